"""Nodes on one machine: each has a hostname, an address, processes, mounts and shared memory of its own.

A node is a set of namespaces (network, UTS, mount, PID, IPC) that one process holds open: `cat`, as its PID 1, which
ends as soon as the process that made the node ends, however it ends. The kernel then kills all processes of the node
and takes its links and mounts away, so nothing can be left behind. All nodes are plugged into a bridge, which is in
a namespace of its own for the same reason; one link leads out of it, so that this machine reaches the nodes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from cluster_tools import ClusterError, called, missing_commands

Command = Sequence[str | Path] | str

# The first line says which process this is: the old /proc knows its id outside. The second waits for the cable.
# /sys is mounted again, or it would show the network of this machine; the cgroups below it stay as they are.
# SIGCHLD is ignored in `cat`, so that the kernel reaps what loses its parent on the node.
PID_1 = """set -e
read -r pid rest </proc/self/stat; echo "$pid"
read -r plugged
hostname "$1"
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir /dev/shm/cgroup
mount --rbind /sys/fs/cgroup /dev/shm/cgroup
mount -t sysfs sysfs /sys
mount --move /dev/shm/cgroup /sys/fs/cgroup
rmdir /dev/shm/cgroup
mount --bind "$2" /etc/hosts
ip link set lo up
if [ -n "$3" ]; then ip addr add "$3" dev eth0; ip link set eth0 up; fi
echo ready
exec env --ignore-signal=CHLD cat >/dev/null
"""
UNSHARE = ["unshare", "--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child"]
PROBE = "ip link add name one type veth peer name two && ip link add name lan type bridge && mount -t proc proc /proc"
#: What this module needs, by the package of Debian that has it.
PACKAGES = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2"}


def why_no_nodes() -> str | None:
    """Say what keeps this machine from having nodes; None where it can."""
    if sys.platform != "linux":
        return "nodes are namespaces of Linux, and this is not Linux"
    if os.geteuid() != 0:
        return "only root may make namespaces and links"
    if absent := missing_commands(PACKAGES):
        return absent
    probe = subprocess.run([*UNSHARE, "sh", "-c", PROBE], capture_output=True, text=True)
    return f"namespaces cannot be made here: {probe.stderr.strip()}" if probe.returncode else None


class Node:
    """One node, alive from ``start`` (or rather ``hold``, then ``plugged``) to ``kill``.

    Attributes:
        name: its hostname.
        address: its address, with the prefix length; empty for one without a cable.
        pid: the process that holds its namespaces, as this machine counts.
    """

    def __init__(self, name: str, address: str, hosts: Path) -> None:
        self.name, self.address, self.hosts = name, address, hosts
        self.pid = 0
        self._holder: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[Any]] = []

    @property
    def ip(self) -> str:
        """Its address without the prefix length."""
        return self.address.partition("/")[0]

    @property
    def mac(self) -> str:
        """The address of its network card: that of a node that was restarted is in the tables of the others."""
        return "02:00:" + ":".join(f"{int(part):02x}" for part in self.ip.split("."))

    @property
    def is_alive(self) -> bool:
        """Whether its namespaces are there."""
        return self._holder is not None and self._holder.poll() is None

    def hold(self) -> None:
        """Make its namespaces, which then wait for the cable."""
        self._holder = subprocess.Popen(
            [*UNSHARE, "sh", "-c", PID_1, "sh", self.name, str(self.hosts), self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self.pid = int(self._told() or 0)

    def plugged(self) -> None:
        """Set its name, address and mounts, now that its cable is in."""
        assert self._holder and self._holder.stdin
        with suppress(BrokenPipeError):  # Then it says why instead of "ready".
            self._holder.stdin.write("\n")
            self._holder.stdin.flush()
        self._told()

    def _told(self) -> str:
        assert self._holder and self._holder.stdout and self._holder.stderr
        if line := self._holder.stdout.readline():
            return line
        said = self._holder.stderr.read().strip()
        self.kill()
        raise ClusterError(f"node {self.name} cannot be made: {said}")

    def enter(self, command: Command, folder: str | Path = "/") -> list[str]:
        """Return the command line that runs a command on this node; a string is run by sh."""
        if not self.is_alive:
            raise ClusterError(f"node {self.name} is dead")
        args = ["sh", "-c", command] if isinstance(command, str) else [*map(str, command)]
        return ["nsenter", f"--target={self.pid}", "--all", "env", f"--chdir={folder}", *args]

    def run(self, command: Command, folder: str | Path = "/", **options: Any) -> str:
        """Run a command on this node to its end and return its stdout; raise if it fails."""
        return called(self.enter(command, folder), **options)

    def links(self, lines: str) -> None:
        """Run lines of `ip -batch` in this node's network, by processes that still count as this machine does."""
        called(["nsenter", f"--target={self.pid}", "--net", "ip", "-batch", "-"], input=lines)

    def popen(self, command: Command, folder: str | Path = "/", **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this node; it ends with the node, if not before."""
        process = subprocess.Popen(self.enter(command, folder), start_new_session=True, **options)
        self._started.append(process)
        return process

    def kill(self) -> None:
        """Kill all its processes, and return when all of them are gone."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        # Its PID 1 is a child of the holder, so this id is its own until the holder has ended.
        if holder.poll() is None and self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        _close(holder.stdin, holder.stdout, holder.stderr)
        holder.wait()
        for process in self._started:
            process.wait()
            _close(process.stdin, process.stdout, process.stderr)
        self._started.clear()


class Network:
    """Nodes on one bridge, which this machine reaches too.

    Args:
        folder: where its file of hosts goes.
        names: hostnames of the nodes.
    """

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.link = self.subnet = ""
        self._hosts, self._names = folder / "hosts", [*names]
        self._switch = Node("switch", "", self._hosts)
        self.nodes: dict[str, Node] = {}

    def start(self) -> None:
        """Make the bridge, the link to it and all nodes; nothing of it is left if that fails."""
        with ExitStack() as undo:
            undo.callback(self.stop)
            self._hosts.write_text("")
            self._switch.hold()
            self._switch.plugged()
            self._link_out()
            self.nodes = {
                name: Node(name, f"{self.subnet}.{number}/24", self._hosts)
                for number, name in enumerate(self._names, start=1)
            }
            known = [f"{node.ip} {name}" for name, node in self.nodes.items()]
            lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", f"{self.subnet}.254 outside", *known]
            self._hosts.write_text("\n".join(lines) + "\n")
            self.start_nodes(self._names)
            undo.pop_all()

    def start_nodes(self, names: Iterable[str]) -> None:
        """Make nodes that are not there, or not any more, all at the same time."""
        nodes = [self.nodes[name] for name in names]
        for node in nodes:
            node.hold()
        ports = [
            f"link add name {node.name} type veth peer name eth0 address {node.mac} netns {node.pid}\n"
            f"link set {node.name} master lan up\n"
            for node in nodes
        ]
        self._switch.links("".join(ports))
        for node in nodes:
            node.plugged()

    def _link_out(self) -> None:
        """Link this machine to the bridge. The link's name stands for a subnet: no two networks can take the same."""
        for number in range(256):
            number = (os.getpid() + number) % 256
            link = ["ip", "link", "add", "name", f"allranks{number}", "type", "veth", "peer", "name", "outside"]
            try:
                called([*link, "netns", str(self._switch.pid)])
            except ClusterError as error:
                if "File exists" not in str(error):
                    raise
                continue
            # Networks of the block that is set aside for tests of networks, RFC 2544.
            self.link, self.subnet = f"allranks{number}", f"198.18.{number}"
            break
        else:
            raise ClusterError("256 networks of nodes are on this machine: no more are possible")
        called(["ip", "addr", "add", f"{self.subnet}.254/24", "dev", self.link])
        called(["ip", "link", "set", self.link, "up"])
        self._switch.links("link add name lan type bridge\nlink set lan up\nlink set outside master lan up\n")

    def cut(self, name: str) -> None:
        """Take a node off the network, as a cable that is pulled: nobody is told."""
        self._switch.links(f"link set {name} down\n")

    def mend(self, name: str) -> None:
        """Put a node's cable in again."""
        self._switch.links(f"link set {name} up\n")

    def kill(self, name: str) -> None:
        """End a node as a power failure does: its peers get no packet that says so."""
        if self.nodes[name].is_alive:
            self.cut(name)
            self.nodes[name].kill()
            with suppress(ClusterError):  # The kernel takes the cable away too, some time later.
                self._switch.links(f"link delete {name}\n")

    def stop(self) -> None:
        """Kill all nodes and take the links away."""
        for node in [*self.nodes.values(), self._switch]:
            node.kill()
        if self.link:
            subprocess.run(["ip", "link", "delete", self.link], capture_output=True)
            self.link = ""


def _close(*streams: IO[Any] | None) -> None:
    for stream in streams:
        if stream:
            stream.close()
