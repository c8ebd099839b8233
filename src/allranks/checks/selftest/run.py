"""Runs the ranks of a job with the self-test instead of its script, and reads what they report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from allranks.checks.waiting import Watcher
from allranks.clusters.batch.cluster import BatchCluster
from allranks.errors import JobError
from allranks.job.variables import redacted
from allranks.job.yaml import dump_yaml
from allranks.launch import submit as launching
from allranks.launch.refresh import settled
from allranks.plan.plain import is_used
from allranks.record.selftest import RankInfo, SelfTestReport, read
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind
    from allranks.launch.submit import Launch
    from allranks.runs.record import Run

T = TypeVar("T", bound=SelfTestReport)

#: What the ranks run: it is in the code that each run carries for its nodes.
MODULE = "allranks.selftest"
#: Time limit in seconds: a job of days waits in a queue longer than one of minutes.
_LONGEST = 15 * 60
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Trial:
    """A self-test whose run has ended."""

    run: Run
    world_size: int  # Ranks that were asked for; 0: as many as the nodes have GPUs, or as there are nodes.
    reports: tuple[SelfTestReport, ...]  # All reports of the ranks, rank after rank.

    @property
    def has_succeeded(self) -> bool:
        """Whether all ranks exited without an error, whatever they have computed."""
        return self.run.record.status.state is State.SUCCEEDED

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank that has reported, by rank."""
        return {who.rank: who.host for who in self.of(RankInfo)}

    def of(self, kind: type[T]) -> list[T]:
        """Return the reports of a kind, rank after rank."""
        return [one for one in self.reports if isinstance(one, kind)]

    def name(self, rank: int) -> str:
        """Write a rank with its host."""
        return f"rank {rank} on {self.hosts[rank]}" if rank in self.hosts else f"rank {rank}"


def run_trial(
    launch: Launch, kind: ClusterKind, args: Sequence[str] = (), *, watcher: Watcher | None = None, module: str = MODULE
) -> Trial:
    """Run all ranks of a job with a module of ours instead of its script, and wait until they have exited.

    Raises:
        AllranksError: it could not be started. One that was started and failed is returned.
    """
    watcher = watcher or Watcher()
    trying = trial_of(launch, kind, args, module)
    run, plan = launching.prepare(trying, kind)
    environ = trying.environ_for(plan)
    run, started = launching.start(
        run, plan, kind, environ, detach=False, watched=False, interrupted=watcher.interrupted
    )
    try:
        watcher.attach(run, plan, started)
        while not started.wait(_POLL_SECONDS):
            watcher.news(run, started.news())
    except BaseException:  # A signal, too.
        kind.cancel(run)
        raise
    if not kind.status(run).state.is_final:
        kind.cancel(run)  # Its agent was killed: leave no rank behind.
    run = settled(run, kind)
    kind.fetch(run)
    size = 0 if plan.ranks_unknown or plan.min_nodes else plan.world_size
    return Trial(run, size, tuple(read(run.attempt_folder)))


def trial_of(launch: Launch, kind: ClusterKind, args: Sequence[str], module: str = MODULE) -> Launch:
    """Return a launch with the self-test instead of the script, in one attempt that ends with this command.

    Raises:
        JobError: the job uses torch's own launcher.
    """
    job = launch.job
    if is_used(job):
        raise JobError(
            "the test runs in the ranks, and nothing of allranks does with torch's own launcher",
            why="launch.agent is false" if not job.launch.agent else f"launch.launcher is {job.launch.launcher}",
            fix="allranks test --agent --launcher torchrun",
        )
    time = job.resources.time
    requeue = {"requeue": False} if isinstance(kind, BatchCluster) else {}  # Other kinds would note that they lack it.
    job = job.model_copy(
        update={
            **{"name": "test", "script": None, "binary": None, "module": module, "args": (*args,)},
            "launch": job.launch.model_copy(update={"max_restarts": 0, "attach": kind.name == "ssh"}),
            "retry": job.retry.model_copy(update=requeue),
            "scheduler": job.scheduler.model_copy(update={"array": None}),
            "resources": job.resources.model_copy(update={"time": time and min(time, _LONGEST)}),
        }
    )
    return replace(launch, job=job, job_text=dump_yaml(redacted(job)))
