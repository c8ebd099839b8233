"""The files and daemons of a Slurm cluster, on nodes that are there already."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cgroups import Cgroups, is_v2, why_no_cgroups
from cluster_tools import ClusterError, called, missing_commands, wait_until
from nodes import PACKAGES, Network, why_no_nodes
from slurm_conf import Layout, Shape, files

from waiting import PATIENCE

#: The node that is none of Slurm's: slurmctld, munged and the database.
CONTROLLER = "ctl"
SLURM_PACKAGES = {**PACKAGES, "munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
ACCOUNTING_PACKAGES = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server-core"}
#: A database for nobody but slurmdbd, on an address that only the controller's node has, for the time of the tests.
MARIADB = [
    *("mariadbd", "--no-defaults", "--user=root", "--skip-grant-tables", "--bind-address=127.0.0.1", "--skip-log-bin"),
    *("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0"),
]
#: Ask again and soon who has an address, so that slurmctld sees within seconds that nobody has it any more.
ARP = """cd /proc/sys/net/ipv4/neigh/eth0
echo 1000 >base_reachable_time_ms; echo 0 >delay_first_probe_time
echo 200 >retrans_time_ms; echo 1 >ucast_solicit; echo 1 >mcast_solicit"""
SYSTEM_TABLES = "/usr/share/mysql/mysql_system_tables.sql"
#: What sacctmgr adds: an account that root may use, and two QOS, one of them with a limit.
ACCOUNTS = """\
add account lab
add qos urgent set Priority=100
add qos brief set MaxWall=2
add user root Account=lab
modify user root set DefaultAccount=lab
modify user root where Account=lab set QOS=normal,urgent,brief
""".splitlines()


def why_no_slurm(shape: Shape) -> str | None:
    """Say what keeps this machine from carrying a Slurm cluster; None where it can."""
    wanted = {**SLURM_PACKAGES, **(ACCOUNTING_PACKAGES if shape.accounting else {})}
    return missing_commands(wanted) or why_no_nodes() or (why_no_cgroups() if shape.cgroups else None)


class SlurmDaemons:
    """What runs on the nodes of a network to make a Slurm cluster of them.

    Args:
        layout: where the files are.
        shape: how many nodes, GPUs and so on.
        network: the nodes, ``ctl`` among them; it ends the daemons.
        environment: of the daemons, and of the jobs they start.
    """

    def __init__(self, layout: Layout, shape: Shape, network: Network, environment: dict[str, str]) -> None:
        self.layout, self.shape, self.network, self.environment = layout, shape, network, environment
        self._cgroups: Cgroups | None = None
        self._running: dict[str, subprocess.Popen[Any]] = {}

    def write_files(self) -> None:
        """Write what the daemons read, and make the directories that they write to."""
        if self.shape.cgroups:
            self._cgroups = Cgroups(self.network.link)
        addresses = {name: node.ip for name, node in self.network.nodes.items()}
        for folder in ("etc", "munge", "state", "log", "spool"):
            (self.layout.folder / folder).mkdir(mode=0o755)
        self.layout.munge_key.write_bytes(os.urandom(128))
        self.layout.munge_key.chmod(0o600)
        for name, text in files(self.shape, self.layout, addresses, is_v2()).items():
            path = self.layout.conf.with_name(name)
            path.touch(mode=0o600 if name == "slurmdbd.conf" else 0o644)
            path.write_text(text)
        for node in addresses.keys() - {CONTROLLER}:
            self.layout.spool(node).mkdir()
            self.layout.gpu(node, 0).parent.mkdir(parents=True)
            for number in range(self.shape.gpus):  # Each is a /dev/null.
                os.mknod(self.layout.gpu(node, number), 0o666 | stat.S_IFCHR, os.makedev(1, 3))

    def start_munge(self) -> None:
        """Start munged. Its socket is a file, so that the one serves all nodes."""
        folder = self.layout.munge_key.parent
        paths = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "seed")]
        paths += [f"--socket={self.layout.munge_socket}", f"--key-file={self.layout.munge_key}"]
        paths += [f"--log-file={self.layout.log('munged')}"]
        # The directory of a test is closed to other users, which munged takes for a mistake.
        self._start(CONTROLLER, "munged", ["munged", "--foreground", "--force", *paths])
        self._await("munged", self.layout.munge_socket.exists)

    def start_accounting(self) -> None:
        """Start the database and slurmdbd, which knows the account ``lab`` of root then."""
        controller, folder = self.network.nodes[CONTROLLER], self.layout.database
        folder.mkdir()
        # A file system that goes with the node, and that waits for no disk.
        controller.run(["mount", "-t", "tmpfs", "tmpfs", folder])
        database = [*MARIADB, f"--datadir={folder}", f"--socket={folder}.socket"]
        # Slurm keeps procedures in the database, and these are kept in one of its system tables.
        tables = f"create database mysql;\nuse mysql;\n{Path(SYSTEM_TABLES).read_text()}"
        controller.run([*database, "--bootstrap"], input=tables)
        self._start(CONTROLLER, "mariadbd", database)
        self._await("mariadbd", Path(f"{folder}.socket").exists)
        self._start(CONTROLLER, "slurmdbd", ["slurmdbd", "-D"])
        self._await("slurmdbd", lambda: self._answers("sacctmgr", "--noheader", "list", "cluster"))
        for line in ("add cluster allranks", *ACCOUNTS):
            called(["sacctmgr", "--immediate", *line.split()], env=self.environment)

    def start_controller(self, *args: str) -> None:
        """Start slurmctld, with arguments of its own, and wait until it answers."""
        self.network.nodes[CONTROLLER].run(ARP)
        self._start(CONTROLLER, "slurmctld", ["slurmctld", "-D", *args])
        self._await("slurmctld", lambda: "UP" in self._answers("scontrol", "ping"))

    @property
    def has_controller(self) -> bool:
        """Whether slurmctld runs."""
        return "slurmctld" in self._running and self._running["slurmctld"].poll() is None

    def stop_controller(self) -> None:
        """End slurmctld as an admin does; its jobs and steps run on."""
        process = self._running.pop("slurmctld")
        self.network.nodes[CONTROLLER].run(["kill", "-TERM", self._pid_file("slurmctld").read_text().strip()])
        process.wait(PATIENCE)

    def start_slurmd(self, names: Iterable[str]) -> None:
        """Start slurmd on nodes, all at the same time; ``sinfo`` shows when they are there."""
        for name in names:
            if self._cgroups:
                self._cgroups.give(self.network.nodes[name])
            self._start(name, name, ["slurmd", "-D", "-N", name])

    def remove(self) -> None:
        """Remove what outlives the nodes."""
        if self._cgroups:
            self._cgroups.remove()

    def check(self) -> None:
        """Raise if a daemon has ended on a node that is alive, with the last lines of its log."""
        for name, process in self._running.items():
            if process.poll() is not None and self.network.nodes.get(name, self.network.nodes[CONTROLLER]).is_alive:
                log = self.layout.log(name).with_suffix(".out")
                said = "\n  ".join(log.read_text(errors="replace").splitlines()[-8:])
                raise ClusterError(f"the daemon {name} ended with {process.returncode}: see {log}\n  {said}")

    def _start(self, node: str, name: str, command: list[str]) -> None:
        with self.layout.log(name).with_suffix(".out").open("ab") as log:
            self._running[name] = self.network.nodes[node].popen(
                ["sh", "-c", 'echo $$ >"$0" && exec "$@"', self._pid_file(name), *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _pid_file(self, name: str) -> Path:
        return self.layout.folder / f"{name}.pid"

    def _await(self, name: str, ready: Callable[[], Any]) -> None:
        def look() -> Any:
            self.check()
            return ready()

        wait_until(f"{name} to be ready", look)

    def _answers(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout or ("empty" if done.returncode == 0 else "")
