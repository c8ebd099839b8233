"""Nodes that are reached over ssh: each node of a network has an sshd, and a user of this machine has a key for all.

The user's configuration of ssh comes by a wrapper, first in PATH: ssh takes no notice of HOME. The wrapper also has ssh
look names up in the file of hosts that the nodes have, so that a name means the same here and on each node.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from cluster_tools import ClusterError, called, missing_commands, passwd_of_root, wait_until
from nodes import Network, Node

from allranks import contract

SSHD, SSH = "/usr/sbin/sshd", "/usr/bin/ssh"
#: What this module needs besides the nodes, by the package of Debian that has it.
SSH_PACKAGES = {SSHD: "openssh-server", SSH: "openssh-client", "ssh-keygen": "openssh-client"}
#: The name that only the user's configuration knows; it stands for the first node.
ALIAS = "alias01"

SERVER = """\
AcceptEnv {waits}
HostKey {host_key}
AuthorizedKeysFile {authorized}
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
LogLevel VERBOSE
MaxStartups 100
"""
CLIENT = """\
Host {alias}
    HostName {first}
Host *
    SendEnv {waits}
    IdentityFile {key}
    IdentitiesOnly yes
    UserKnownHostsFile {known_hosts}
    GlobalKnownHostsFile /dev/null
"""
# The hosts are mounted in a namespace that ends with ssh; every step is an exec, so that signals reach ssh.
WRAPPER = """\
#!/bin/sh
exec unshare --mount sh -c 'mount --bind "$0" /etc/hosts && exec "$@"' {hosts} {ssh} -F {config} "$@"
"""


def why_no_sshd() -> str | None:
    """Say what keeps the nodes of a network from having an sshd; None where they can."""
    return missing_commands(SSH_PACKAGES)


class SshNodes:
    """An sshd on each node of a network, and a user who may log in to all of them, from here and from each node.

    Args:
        network: the nodes, which are there.
        folder: where keys, configurations and logs go; all nodes see it.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.home = folder / "home"
        self._daemons: dict[str, subprocess.Popen[Any]] = {}
        # Short: the path of a socket has 108 bytes at most.
        self.runtime = Path(tempfile.mkdtemp(prefix="ssh-"))

    def start(self) -> None:
        """Make all keys and configurations, and start sshd on all nodes; return when all of them take connections."""
        names = [*self.network.nodes]
        for name in ["user", *names]:
            called(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", self.folder / name])
        (self.folder / "nobody.pub").write_text("")
        self._make_home()
        self._make_user(names)
        # It must be there, as the service of Debian makes it at boot; left in place, since other sshds may use it.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        try:
            self._start(names, "user")
        except BaseException:
            self.stop()
            raise

    def _make_home(self) -> None:
        """Give the user a home of the nodes' own, with nothing in it that a shell would run first."""
        self.home.mkdir()
        (self.folder / "passwd").write_text(passwd_of_root(self.home))

    def _make_user(self, names: list[str]) -> None:
        """Write what the user's ssh reads, and the wrapper that says so."""
        config, wrapper = self.folder / "config", self.folder / "bin" / "ssh"
        settings = {"waits": contract.WAITS, "key": self.folder / "user", "known_hosts": self.folder / "known_hosts"}
        config.write_text(CLIENT.format(alias=ALIAS, first=names[0], **settings))
        paths = {"hosts": self.network.nodes[names[0]].hosts, "ssh": SSH, "config": config}
        wrapper.parent.mkdir()
        wrapper.write_text(WRAPPER.format(**{name: shlex.quote(str(path)) for name, path in paths.items()}))
        wrapper.chmod(0o755)
        self.know_all()

    def env(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return an environment in which ``ssh`` is the user's, without an agent that has other keys."""
        env = {**base, "PATH": f"{self.folder / 'bin'}:{base['PATH']}", "XDG_RUNTIME_DIR": str(self.runtime)}
        env.pop("SSH_AUTH_SOCK", None)
        return env

    def know_all(self) -> None:
        """Have the user know the host keys of all nodes, by name and by address."""
        keys = {name: (self.folder / f"{name}.pub").read_text() for name in self.network.nodes}
        lines = [f"{name},{self.network.nodes[name].ip} {key}" for name, key in keys.items()]
        (self.folder / "known_hosts").write_text("".join(lines))

    def forget_key(self, name: str) -> None:
        """Have the user not know a node's host key, until ``know_all``."""
        known = self.folder / "known_hosts"
        lines = known.read_text().splitlines(keepends=True)
        known.write_text("".join(line for line in lines if not line.startswith(f"{name},")))
        self.end_kept()

    def lock_out(self, name: str) -> None:
        """Have a node take no key, until ``restart``; connections to it are ended."""
        self._end([name])
        self._start([name], "nobody")

    def restart(self, name: str) -> None:
        """Start a node's sshd as it was at first, whether the one before lives or the node itself was restarted."""
        self._end([name])
        self._start([name], "user")

    def hang(self, name: str) -> None:
        """Stop a node's sshds, so that it takes connections and never answers, until ``wake``."""
        self.end_kept()
        for process in self.processes(name):
            os.kill(process, signal.SIGSTOP)

    def wake(self, name: str) -> None:
        """Have the sshds of a node continue, and what has entered the node for them: it stops when they do."""
        for process in (*self.processes(name), self._daemons[name].pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    def stop(self) -> None:
        """End all sshds and all connections to them."""
        self._end([*self._daemons])
        self.end_kept()
        shutil.rmtree(self.runtime, ignore_errors=True)

    def kept(self) -> list[int]:
        """Return the processes that keep connections of the user: each calls itself by the path of its socket."""
        title = b"ssh: " + os.fsencode(self.runtime)
        return [process for process in _processes() if _called(process).startswith(title)]

    def end_kept(self) -> None:
        """End all connections that are kept."""
        for process in self.kept():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        wait_until("the end of kept connections", lambda: not self.kept())

    def processes(self, name: str) -> list[int]:
        """Return the processes of a node that are sshd, for connections too, as this machine counts."""
        return _sshds(self.network.nodes[name])

    def log(self, name: str) -> Path:
        """Return where a node's sshd says what happens."""
        return self.folder / f"{name}.log"

    def _start(self, names: Iterable[str], who: str) -> None:
        """Start sshd on nodes, for who has the key of that name; wait until all of them take connections."""
        names = [*names]
        for name in names:
            config = self.folder / f"{name}.sshd_config"
            authorized = self.folder / f"{who}.pub"
            keys = {"host_key": self.folder / name, "authorized": authorized}
            config.write_text(SERVER.format(waits=contract.WAITS, **keys))
            self.network.nodes[name].run(["mount", "--bind", self.folder / "passwd", "/etc/passwd"])
            with self.log(name).open("a") as log:
                self._daemons[name] = self.network.nodes[name].popen(
                    [SSHD, "-D", "-e", "-f", config], stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
        for name in names:
            wait_until(f"sshd on {name}", partial(self._accepts, name))

    def _accepts(self, name: str) -> bool:
        """Return whether a node's sshd takes a connection; raise if it ended."""
        code = self._daemons[name].poll()
        if code is not None:
            raise ClusterError(f"sshd on {name} ended with {code}: {self.log(name).read_text().strip()}")
        try:
            socket.create_connection((self.network.nodes[name].ip, 22), timeout=5).close()
        except OSError:
            return False
        return True

    def _end(self, names: Iterable[str]) -> None:
        """End all sshds of nodes that have any; those of a node that is dead have ended with it."""
        for name in names:
            wait_until(f"the end of sshd on {name}", partial(self._is_killed, name))
            if daemon := self._daemons.pop(name, None):
                daemon.wait()

    def _is_killed(self, name: str) -> bool:
        """Kill what is left of sshd on a node, and return whether nothing was."""
        processes = self.processes(name)
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return not processes


def _sshds(node: Node) -> list[int]:
    """Return the processes in a node's PID namespace whose program is sshd, or one that newer sshds run (sshd-*)."""
    if not node.is_alive:
        return []
    namespace = _link(node.pid, "ns/pid")
    return [
        process
        for process in _processes()
        if _link(process, "ns/pid") == namespace and Path(_link(process, "exe")).name.startswith("sshd")
    ]


def _processes() -> list[int]:
    """Return all processes, as this machine counts."""
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def _called(process: int) -> bytes:
    """Return the command line of a process, or what it calls itself; nothing for one that has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _link(process: int, name: str) -> str:
    """Return where a link of a process leads; nowhere for one that has ended."""
    try:
        return str(Path(f"/proc/{process}/{name}").readlink())
    except OSError:
        return ""
