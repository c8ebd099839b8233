"""Clusters of all kinds as scenarios see them: each starts runs, names their nodes, cancels them, and has nothing left.

What a kind says in words of its own is asserted in tests of its own, except for the few words that are here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from cluster_tools import wait_until
from followed_runs import Followed, follow, hosts_of, run_named
from grid_engine_cluster import GridEngineCluster
from left_behind import assert_nothing_lives
from nodes import Network
from pbs_cluster import StandInPbs
from slurm_cluster import SlurmCluster
from ssh_runs import left_on

from waiting import PATIENCE

T = TypeVar("T")
#: Which fixtures bring up the cluster of each site.
FIXTURES = {
    "slurm": ("lab", "slurm"),
    "pbs": ("pbs_lab", "pbs"),
    "standin": ("standin_lab", "standin"),  # Never the real one: with it goes what only an admin may do.
    "torque": ("torque_lab", "torque"),
    "grid_engine": ("grid_engine_lab", "grid_engine"),
    "ssh": ("ssh_lab", "network"),
    "pdsh": ("pdsh_lab", "network"),
}


@dataclass
class Site:
    """A cluster that the command knows as ``lab``.

    Attributes:
        kind: one of ``FIXTURES``.
        lab: the command, in a directory that knows the cluster.
        cluster: the cluster; for machines without a scheduler their network.
    """

    kind: str
    lab: Any
    cluster: Any
    #: What starts ranks there: schedulers may do so themselves.
    launchers = ("torchrun", "direct")
    #: The flag that asks for so many ranks on a node.
    ranks_flag = "--gpus-per-node"

    def start(
        self, name: str, script: str | Path, counts: Sequence[int], *flags: object, **env: str | None
    ) -> Followed:
        """Start a run of a script, with so many ranks on each of its nodes, and follow it."""
        (count,) = {*counts}
        shape = ("--nodes", len(counts), self.ranks_flag, count)
        return follow(self.lab, name, script, *shape, *flags, **env)

    def hosts(self, run: Followed) -> list[str]:
        """Return the hosts that a run has, in the order of its nodes."""
        return self.hosts_of(run.job)

    def hosts_of(self, job: str) -> list[str]:
        """Return the hosts that the scheduler gave a job, in the order of its nodes."""
        raise NotImplementedError

    def task(self, job: str, number: int) -> str:
        """Return the id of a task of a job array."""
        raise NotImplementedError

    def logs_of_scheduler(self, run: Followed) -> list[str]:
        """Return the names of the files in a run's directory that the scheduler itself writes."""
        return []

    @property
    def record_kind(self) -> str:
        """The kind of cluster that a run has on record."""
        return self.kind

    def cancel_outside(self, run: Followed) -> None:
        """Cancel a run by a command of the scheduler."""
        raise NotImplementedError

    def why_cancelled(self, run: Followed) -> str:
        """Return how the command says why a run was cancelled, as far as that is the scheduler's word."""
        return ""

    def native(self, state: str) -> str | None:
        """Return the scheduler's own word for a state of a run; None where it has none that counts."""
        return None

    def submit(self, script: Path) -> list[str]:
        """Submit a script as a person does, wait until it has ended well, and return its hosts."""
        raise NotImplementedError

    def wait_until(self, what: str, done: Callable[[], T | None], seconds: float = PATIENCE) -> T:
        """Return what ``done`` gives as soon as it gives something; the limit is there for a hang only."""
        return wait_until(what, done, seconds)

    def requeue(self, job: str) -> None:
        """Put a job back, as an admin."""
        raise NotImplementedError

    def let_save(self) -> None:
        """Leave a training that is ended the time that it takes a slow machine to save, where that is a setting."""

    def assert_nothing_left(self) -> None:
        """Assert that nothing of the runs lives on any node."""
        assert_nothing_lives(self.cluster, self.lab)

    def close(self) -> None:
        """Leave the cluster as the next test expects it."""


class SchedulerSite(Site):
    """What has a queue, and is idle after each scenario."""

    def wait_until(self, what: str, done: Callable[[], T | None], seconds: float = PATIENCE) -> T:
        """Show the scheduler's view if the wait is in vain."""
        found: T = self.cluster.wait_until(what, done, seconds)
        return found

    def close(self) -> None:
        self.cluster.reset()


class SlurmSite(SchedulerSite):
    """A real Slurm."""

    cluster: SlurmCluster

    def hosts_of(self, job: str) -> list[str]:
        nodes = self.cluster.job(int(job))["NodeList"]
        return self.cluster.run("scontrol", "show", "hostnames", nodes).split()

    def task(self, job: str, number: int) -> str:
        return f"{job}_{number}"

    def logs_of_scheduler(self, run: Followed) -> list[str]:
        return [f"slurm-{run.job}.out"]

    def cancel_outside(self, run: Followed) -> None:
        self.cluster.run("scancel", run.job)

    def native(self, state: str) -> str:
        return "COMPLETED" if state == "SUCCEEDED" else state

    def submit(self, script: Path) -> list[str]:
        job = self.cluster.sbatch(script, folder=script.parent)
        assert self.cluster.wait_for_state(job)["JobState"] == "COMPLETED"
        return self.hosts_of(str(job))

    def requeue(self, job: str) -> None:
        self.cluster.run("scontrol", "requeue", job)


class PbsSite(SchedulerSite):
    """OpenPBS, real or its stand-in, or the stand-in of Torque."""

    cluster: Any  # PbsCluster, and for what an admin does StandInPbs.

    def hosts_of(self, job: str) -> list[str]:
        return hosts_of(self.cluster, job)

    def task(self, job: str, number: int) -> str:
        return job.replace("[]", f"[{number}]")

    def logs_of_scheduler(self, run: Followed) -> list[str]:
        return [f"pbs-{run.job.partition('.')[0]}.out"]

    @property
    def record_kind(self) -> str:
        return "pbs"

    def cancel_outside(self, run: Followed) -> None:
        self.cluster.run("qdel", run.job)

    def why_cancelled(self, run: Followed) -> str:
        if self.kind == "torque":
            return ""
        (user,) = re.findall(r" and terminated by (\S+)", self.cluster.job(run.job)["comment"])
        return f" (it was deleted by {user})"

    def native(self, state: str) -> str:
        if state == "RUNNING":
            return "R (running)"
        return "C (completed)" if self.kind == "torque" else "F (finished)"

    def submit(self, script: Path) -> list[str]:
        elsewhere = script.parent / "else where"
        elsewhere.mkdir(exist_ok=True)
        job = self.cluster.qsub(script, folder=elsewhere)
        assert self.cluster.wait_for_state(job)["Exit_status"] == "0"
        return hosts_of(self.cluster, job)

    def let_save(self) -> None:
        if isinstance(self.cluster, StandInPbs):
            self.cluster.set(kill_delay=PATIENCE, requeue_timeout=PATIENCE)

    def requeue(self, job: str) -> None:
        self.cluster.set(operator=True)
        self.cluster.run("qrerun", job)


class GridEngineSite(SchedulerSite):
    """A real Grid Engine."""

    cluster: GridEngineCluster
    ranks_flag = "--nproc-per-node"

    def hosts(self, run: Followed) -> list[str]:
        """Return what the tasks have noted: Grid Engine itself remembers the first host alone."""
        return self._hosts_in(run.folder)

    def _hosts_in(self, run: Path) -> list[str]:
        found = (path.read_text().split() for path in sorted(run.glob("attempts/000/node-*/*.exit")))
        return list(dict.fromkeys(host for _, host in found))

    def task(self, job: str, number: int) -> str:
        return f"{job}.{number}"

    def logs_of_scheduler(self, run: Followed) -> list[str]:
        return [f"grid-engine-{run.job}.out"]

    def cancel_outside(self, run: Followed) -> None:
        self.cluster.run("qdel", run.job)

    def native(self, state: str) -> str:
        return "r (running)" if state == "RUNNING" else "finished"

    def submit(self, script: Path) -> list[str]:
        elsewhere = script.parent / "else where"
        elsewhere.mkdir(exist_ok=True)
        job = int(self.cluster.run("qsub", "-terse", script, folder=elsewhere))
        assert self.cluster.finished(job)["exit_status"] == "0"
        return self._hosts_in(run_named(self.lab, script.stem))


class SshSite(Site):
    """Machines that are reached over SSH, each by itself or by pdsh."""

    cluster: Network
    launchers = ("torchrun",)
    ranks_flag = "--nproc-per-node"

    def hosts(self, run: Followed) -> list[str]:
        return [*self.cluster.nodes][: self.lab.record(run.folder)["nnodes"]]

    def assert_nothing_left(self) -> None:
        """These kinds promise more: nothing is left by the time that the command ends."""
        assert [left_on(self.cluster, run) for run in self.lab.runs()] == [{}] * len(self.lab.runs())


KINDS: dict[str, type[Site]] = {
    "slurm": SlurmSite,
    "pbs": PbsSite,
    "standin": PbsSite,
    "torque": PbsSite,
    "grid_engine": GridEngineSite,
    "ssh": SshSite,
    "pdsh": SshSite,
}


def on(*kinds: str) -> pytest.MarkDecorator:
    """Run a scenario on clusters of these kinds, each of which it gets as ``site``."""
    return pytest.mark.parametrize("site", kinds, indirect=True)
