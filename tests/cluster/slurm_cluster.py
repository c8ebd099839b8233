"""A real Slurm cluster on one machine: slurmctld, munged, and one slurmd per node, in the namespaces of nodes.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from cluster_tools import ClusterError, called, wait_until
from nodes import Command, Network
from slurm_conf import LONGEST_FOLDER, Layout, Shape
from slurm_daemons import CONTROLLER, SlurmDaemons, why_no_slurm

from waiting import PATIENCE

T = TypeVar("T")
#: States that a job keeps.
FINISHED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "DEADLINE", "BOOT_FAIL"),
)


class SlurmCluster:
    """A Slurm cluster, between ``start`` and ``stop``, or in a ``with``.

    Args:
        folder: gets all files of the cluster; to be removed by whoever gave it. A short path without spaces.
        shape: how many nodes, GPUs and so on.

    Attributes:
        nodes: names of the nodes.
        env: what the environment of Slurm's commands needs: SLURM_CONF, and the PATH of jobs.
        environment: this process's environment with that.
        network: the nodes without Slurm, ``ctl`` for slurmctld among them.
    """

    def __init__(self, folder: Path, shape: Shape | None = None) -> None:
        self.layout, self.shape = Layout(folder.resolve()), shape or Shape()
        self.nodes = [f"node{number:02}" for number in range(1, self.shape.nodes + 1)]
        self.network = Network(self.layout.folder, [CONTROLLER, *self.nodes])
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.env = {"SLURM_CONF": str(self.layout.conf), "PATH": path}
        # Nothing of a Slurm that this process may itself run under.
        outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environment = {**outside, **self.env}
        self.daemons = SlurmDaemons(self.layout, self.shape, self.network, self.environment)

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Bring it up, until all nodes are idle; nothing of it is left running if that fails."""
        if why := why_no_slurm(self.shape):
            raise ClusterError(why)
        if len(name := str(self.layout.folder)) > LONGEST_FOLDER or any(mark in name for mark in " #'\"\\"):
            raise ClusterError(f"Slurm's files need a path of at most {LONGEST_FOLDER} plain characters, not {name!r}")
        with ExitStack() as undo:
            undo.callback(self.stop)
            self.network.start()
            self.daemons.write_files()
            self.daemons.start_munge()
            if self.shape.accounting:
                self.daemons.start_accounting()
            self.daemons.start_controller()
            self.daemons.start_slurmd(self.nodes)
            self.wait_idle()
            undo.pop_all()

    def stop(self) -> None:
        """End all its processes and take its network away. The files stay."""
        self.network.stop()
        self.daemons.remove()

    # Commands and jobs

    def run(self, *command: str | Path, folder: Path | None = None, **options: Any) -> str:
        """Run a client such as sbatch on this machine and return its stdout; raise with its words if it fails."""
        return called(command, cwd=folder, env=self.environment, **options)

    def run_on(self, node: str, command: Command, folder: str | Path = "/", **options: Any) -> str:
        """Run a command on a node, ``ctl`` included, and return its stdout; raise if it fails."""
        return self.network.nodes[node].run(command, folder, **{"env": self.environment, **options})

    def popen_on(self, node: str, command: Command, folder: str | Path = "/", **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a node; it ends with the node, if not before."""
        return self.network.nodes[node].popen(command, folder, **{"env": self.environment, **options})

    def sbatch(self, *args: str | Path, folder: Path | None = None, **options: Any) -> int:
        """Submit a batch job, with sbatch's own arguments, and return its id."""
        return int(self.run("sbatch", "--parsable", *args, folder=folder, **options).split(";")[0])

    def job(self, job: int) -> dict[str, str]:
        """Return what ``scontrol show job`` says; empty for a job that slurmctld does not know any more."""
        try:
            shown = self.run("scontrol", "--oneliner", "show", "job", str(job))
        except ClusterError as error:
            if "Invalid job id" not in str(error):
                raise
            return {}
        return dict(field.partition("=")[::2] for field in shown.split() if "=" in field)

    def wait_for_state(self, job: int, *states: str, seconds: float = PATIENCE) -> dict[str, str]:
        """Wait until a job is in one of the states, FINISHED by default, and return what is known of it."""
        wanted = states or FINISHED

        def reached() -> dict[str, str] | None:
            known = self.job(job)
            return known if known.get("JobState") in wanted else None

        return self.wait_until(f"job {job} to be {' or '.join(wanted)}", reached, seconds)

    def wait_until(self, what: str, done: Callable[[], T | None], seconds: float = PATIENCE) -> T:
        """Return what ``done`` gives as soon as it gives something; if it never does, raise with the cluster's view."""
        try:
            return wait_until(what, done, seconds)
        except ClusterError as error:
            view = self.run("sinfo", "-N", "-O", "NodeHost,StateLong,Reason") + self.run("scontrol", "show", "job")
            raise ClusterError(f"{error}\n{view}") from None

    # Nodes

    def states(self) -> dict[str, str]:
        """Return the state of each node, as sinfo says it: ``idle``, ``mixed``, ``down*``, …."""
        rows = self.run("sinfo", "--noheader", "--partition=main", "-N", "-O", "NodeHost,StateLong").splitlines()
        return dict(row.split() for row in rows)

    def wait_idle(self, seconds: float = PATIENCE) -> None:
        """Wait until all nodes are idle."""
        self.wait_until("all nodes to be idle", lambda: {*self.states().values()} == {"idle"} or None, seconds)

    def cut(self, node: str) -> None:
        """Pull a node's cable: what runs there runs on, and nobody is told."""
        self.network.cut(node)

    def mend(self, node: str) -> None:
        """Put the cable in again."""
        self.network.mend(node)

    def kill_node(self, node: str) -> None:
        """End a node as a power failure does: all its processes are gone, and its peers are not told."""
        self.network.kill(node)

    def start_node(self, node: str) -> None:
        """Start a killed node again, with its slurmd. It is idle when slurmctld has heard of it."""
        self.network.start_nodes([node])
        self.daemons.start_slurmd([node])

    def forget_jobs(self) -> None:
        """Start slurmctld again without its memory of jobs, as it is long after their end. Ids start at 1 again."""
        self.daemons.stop_controller()
        self.daemons.start_controller("-c")
        self.wait_idle()

    def reset(self) -> None:
        """Cancel all jobs, start what is dead, mend what is cut, and wait until all nodes are idle."""
        for node in self.nodes:
            if not self.network.nodes[node].is_alive:
                self.start_node(node)
            self.mend(node)
        if not self.daemons.has_controller:
            self.daemons.start_controller()
        self.run("scancel", "--quiet", "--user=root")
        for node, state in self.states().items():
            if state.startswith(("drain", "down")):
                with suppress(ClusterError):  # It has come back by itself meanwhile.
                    self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.wait_idle()
