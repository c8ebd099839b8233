"""A real Grid Engine on one machine: a qmaster and one execd per node, in the namespaces of nodes.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from cluster_tools import ClusterError, called, missing_commands, passwd_of_root, wait_until
from grid_engine_conf import (
    BOOTSTRAP,
    MASTER,
    PROGRAMS,
    QUEUES,
    SCHEDULER,
    TEMPLATES,
    GridEngineShape,
    changed,
    configuration,
    queue,
    spooled,
)
from nodes import PACKAGES, Command, Network, why_no_nodes

from waiting import PATIENCE

T = TypeVar("T")
GRID_ENGINE_PACKAGES = {
    **PACKAGES,
    "sge_qmaster": "gridengine-master",
    "sge_execd": "gridengine-exec",
    "qsub": "gridengine-client",
}
#: A command on this machine, which knows none of the nodes' names: it runs in the network of the qmaster's node.
ON_MASTER = """\
#!/bin/sh
exec nsenter --target={pid} --net --uts --mount env --chdir="$PWD" {program} "$@"
"""
#: On a node commands are themselves, the TMPDIR of jobs is the node's own, and users' profiles are not this machine's.
MOUNTS = """\
mount --bind {programs} {bin}
mount -t tmpfs -o mode=1777 tmpfs {tmp}
mount --bind {folder}/passwd /etc/passwd
"""


def why_no_grid_engine() -> str | None:
    """Return what keeps this machine from carrying a Grid Engine cluster; None if it can."""
    if absent := missing_commands(GRID_ENGINE_PACKAGES):
        return absent
    qsub = PROGRAMS / "qsub"
    return why_no_nodes() or (None if qsub.exists() else f"qsub is not Grid Engine's: no {qsub}")


class GridEngineCluster:
    """A Grid Engine cluster, between ``start`` and ``stop``, or in a ``with``.

    Args:
        folder: gets all files of the cluster; the caller removes it. A path without spaces.
        shape: how many nodes, slots and so on.

    Attributes:
        nodes: names of the nodes.
        env: what the environment of Grid Engine's commands needs.
        environment: this process's environment with that.
        network: the nodes without Grid Engine, ``ctl`` for the qmaster among them.
    """

    def __init__(self, folder: Path, shape: GridEngineShape | None = None) -> None:
        self.folder, self.shape = folder.resolve(), shape or GridEngineShape()
        self.nodes = [f"node{number:02}" for number in range(1, self.shape.nodes + 1)]
        self.network = Network(self.folder, [MASTER, *self.nodes])
        self.root, self.spool, self.bin = self.folder / "sge", self.folder / "spool", self.folder / "bin"
        self.tmp = self.folder / "tmp"
        self.env = {
            "SGE_ROOT": str(self.root),
            "SGE_CELL": "default",
            "SGE_QMASTER_PORT": "6444",  # The same in each cluster: each has a network of its own.
            "SGE_EXECD_PORT": "6445",
            "PATH": os.pathsep.join([str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        # Nothing of a Grid Engine that this process may itself run under.
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SGE_", "PE_"))}
        self.environment = {**outside, **self.env}
        self._daemons: dict[str, subprocess.Popen[Any]] = {}

    def __enter__(self) -> GridEngineCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Bring it up, until all nodes are idle; nothing of it is left running if that fails."""
        if why := why_no_grid_engine():
            raise ClusterError(why)
        with ExitStack() as undo:
            undo.callback(self.stop)
            self.network.start()
            self._write_files()
            self.start_master()
            self._add_queues()
            self.start_execd(self.nodes)
            self.wait_idle()
            undo.pop_all()

    def stop(self) -> None:
        """End all its processes and take its network away. The files stay."""
        self.network.stop()

    # Daemons

    def _write_files(self) -> None:
        common, spool = self.root / "default" / "common", self.spool / "qmaster"
        for folder in (common, spool, self.bin, self.tmp, self.folder / "home"):
            folder.mkdir(parents=True)
        (self.folder / "passwd").write_text(passwd_of_root(self.folder / "home"))
        for name in ("bin", "lib", "util", "utilbin"):
            (self.root / name).symlink_to(f"/var/lib/gridengine/{name}")
        (common / "act_qmaster").write_text(f"{MASTER}\n")
        (common / "bootstrap").write_text(BOOTSTRAP.format(common=common, spool=spool, programs=PROGRAMS))
        template = (TEMPLATES / "default-configuration").read_text()
        (common / "configuration").write_text(configuration(self.shape, self.spool, template))
        called([PROGRAMS / "spoolinit", "classic", "libspoolc", f"{common};{spool}", "init"], env=self.environment)
        for name in ("centry", "usersets"):
            shutil.copytree(TEMPLATES / "util/resources" / name, spool / name, dirs_exist_ok=True)
        for name, text in spooled(self.shape, self.nodes).items():
            (spool / name).parent.mkdir(exist_ok=True)
            (spool / name).write_text(text)
        for program in PROGRAMS.glob("q*"):
            command = self.bin / program.name
            command.write_text(ON_MASTER.format(pid=self.network.nodes[MASTER].pid, program=program))
            command.chmod(0o755)

    def start_master(self) -> None:
        """Start the qmaster, and wait until it answers."""
        self._start(MASTER, "sge_qmaster")
        wait_until("the qmaster", lambda: self.check() or not self.tried("qconf", "-ss")[0])

    def stop_master(self) -> None:
        """End the qmaster as an admin does; its jobs continue."""
        self.run("qconf", "-km")
        self._daemons.pop(MASTER).wait(PATIENCE)

    def start_execd(self, names: Iterable[str]) -> None:
        """Start execd on nodes; `wait_idle` returns when they have reported."""
        for name in names:
            self._start(name, "sge_execd")

    def _start(self, node: str, program: str) -> None:
        self.run_on(node, MOUNTS.format(programs=PROGRAMS, bin=self.bin, tmp=self.tmp, folder=self.folder))
        # Jobs get the environment of their execd, so that it has nothing but this. SGE_ND: stay in the foreground.
        env = {**self.env, "SGE_ND": "1", "PATH": os.defpath}
        with self.log(node).open("ab") as log:
            self._daemons[node] = self.network.nodes[node].popen(
                [PROGRAMS / program], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def log(self, node: str) -> Path:
        """Return the file that has what the daemon of a node prints."""
        return self.folder / f"{node}.log"

    def check(self) -> None:
        """Raise if a daemon has ended on a node that is alive, with the last lines of its log."""
        for node, process in self._daemons.items():
            if process.poll() is not None and self.network.nodes[node].is_alive:
                said = "\n  ".join(self.log(node).read_text(errors="replace").splitlines()[-8:])
                raise ClusterError(f"the daemon of {node} ended with {process.returncode}\n  {said}")

    def _add_queues(self) -> None:
        scheduler, template = self.run("qconf", "-ssconf"), self.run("qconf", "-sq")
        texts = {name: queue(name, number, self.shape, self.tmp, template) for number, name in enumerate(QUEUES)}
        for name, text in {"scheduler": changed(scheduler, SCHEDULER), **texts}.items():
            path = self.folder / name
            path.write_text(text)
            self.run("qconf", "-Msconf" if name == "scheduler" else "-Aq", path)

    # Commands and jobs

    def run(self, *command: str | Path, folder: Path | None = None, **options: Any) -> str:
        """Run a command such as qsub on this machine and return its stdout; raise with its words if it fails."""
        return called(command, cwd=folder, **{"env": self.environment, **options})

    def tried(self, *command: str | Path, folder: Path | None = None, **options: Any) -> tuple[int, str, str]:
        """Run a command on this machine, and return exit code, stdout and stderr."""
        given = {"cwd": folder, "env": self.environment, "capture_output": True, "text": True, **options}
        done = subprocess.run([*map(str, command)], **given)
        return done.returncode, done.stdout, done.stderr

    def run_on(self, node: str, command: Command, folder: str | Path = "/", **options: Any) -> str:
        """Run a command on a node, ``ctl`` included, and return its stdout; raise if it fails."""
        return self.network.nodes[node].run(command, folder, **{"env": self.environment, **options})

    def qsub(self, *args: str | Path, folder: Path | None = None, **options: Any) -> int:
        """Submit a job to run in ``folder``, with qsub's own arguments, and return its id."""
        return int(self.run("qsub", "-terse", "-cwd", *args, folder=folder, **options).partition(".")[0])

    def states(self) -> dict[int, str]:
        """Return qstat's state of each unfinished job, of an array that of what runs: ``qw``, ``r``, ``Eqw``, …."""
        rows = [line.split() for line in self.run("qstat", "-u", "*").splitlines()[2:]]
        return {int(row[0]): row[4] for row in reversed(rows)}

    def wait_for_state(self, job: int, *states: str) -> None:
        """Wait until a job is in one of the states."""
        self.wait_until(f"job {job} to be {' or '.join(states)}", lambda: self.states().get(job) in states)

    def finished(self, job: int, seconds: float = PATIENCE) -> dict[str, str]:
        """Wait until a job is finished and return its last record of accounting."""

        def record() -> dict[str, str] | None:
            if job in self.states():
                return None
            code, out, _ = self.tried("qacct", "-j", str(job))
            if code:
                return None
            rows = [line.split(None, 1) for line in out.splitlines() if line[0] != "="]
            return {row[0]: row[1].strip() if row[1:] else "" for row in rows}

        return self.wait_until(f"job {job} to finish", record, seconds)

    def wait_until(self, what: str, done: Callable[[], T | None], seconds: float = PATIENCE) -> T:
        """Return what ``done`` gives as soon as it gives something; if it never does, raise with the cluster's view."""
        try:
            return wait_until(what, done, seconds)
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self.run('qstat', '-f', '-u', '*')}") from None

    # Nodes

    def wait_idle(self) -> None:
        """Wait until all nodes have reported and there are no jobs."""

        def idle() -> bool:
            self.check()
            return not self.states() and "u" not in {state for state in self.queue_states().values() for state in state}

        self.wait_until("all nodes to be idle", lambda: idle() or None)

    def queue_states(self) -> dict[str, str]:
        """Return the state of each queue on each node: "" for one that takes jobs, ``au`` on a silent node."""
        rows = [line.split() for line in self.run("qstat", "-f", "-qs", "acdosuACDES").splitlines() if "@" in line]
        return {row[0]: row[-1] for row in rows}

    def cut(self, node: str) -> None:
        """Pull a node's cable: its processes continue."""
        self.network.cut(node)

    def mend(self, node: str) -> None:
        """Put the cable in again."""
        self.network.mend(node)

    def kill_node(self, node: str) -> None:
        """End a node as a power failure does: all its processes are gone, and no peer gets a packet."""
        self.network.kill(node)

    def start_node(self, node: str) -> None:
        """Start a killed node again, with its execd."""
        self.network.start_nodes([node])
        # The qmaster takes no second connection of an execd, and no packet has ended the first one.
        self.run_on(MASTER, ["ss", "--no-header", "--kill", "dst", self.network.nodes[node].ip])
        self.start_execd([node])

    def reset(self) -> None:
        """Delete all jobs, start what is dead, mend what is cut, and wait until all nodes are idle."""
        if self._daemons.get(MASTER) is None:
            self.start_master()
        for node in self.nodes:
            if not self.network.nodes[node].is_alive:
                self.start_node(node)
            self.mend(node)
        if self.states():
            self.tried("qdel", "-f", "-u", "*")
        self.tried("qmod", "-c", "*")
        self.wait_idle()
