"""Starts the ranks of a job with the trial in place of its script, and reads what they tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from allranks.clusters import launch as launching
from allranks.clusters.settle import settled
from allranks.errors import AllranksError, JobError, StartCancelledError
from allranks.job.dump import dump_yaml
from allranks.job.secrets import redacted
from allranks.plan.plain_launcher import is_used
from allranks.preflight.model import Grade, skipped
from allranks.preflight.watcher import Watcher
from allranks.runs import trial as told
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind
    from allranks.clusters.launch import Launch
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan
    from allranks.preflight.model import Finding, Node, Seen
    from allranks.preflight.report import Result
    from allranks.runs.record import Run

T = TypeVar("T", bound=told.Told)

#: What the ranks run: it is in the code that each run carries for its nodes.
MODULE = "allranks.trial"
#: A job of days waits in a queue longer than one of minutes.
_LONGEST = 15 * 60
_WITHOUT_A_QUEUE = ("local", "ssh", "pdsh")
#: How often a run that goes on is looked at.
_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Trial:
    """What became of a trial.

    Attributes:
        run: the run, which has ended.
        world_size: how many ranks were asked for; 0: as many as the nodes have GPUs, or as there are nodes.
        told: all that the ranks have told, rank after rank.
    """

    run: Run
    world_size: int
    told: tuple[told.Told, ...]

    @property
    def has_succeeded(self) -> bool:
        """Whether the run ended well: all ranks came to the end, whatever they have computed."""
        return self.run.record.status.state is State.SUCCEEDED

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank that has told of itself, by rank."""
        return {who.rank: who.host for who in self.of(told.Who)}

    def of(self, kind: type[T]) -> list[T]:
        """Return what was told of a kind, rank after rank."""
        return [one for one in self.told if isinstance(one, kind)]

    def name(self, rank: int) -> str:
        """Write which rank it is, and on which host."""
        return f"rank {rank} on {self.hosts[rank]}" if rank in self.hosts else f"rank {rank}"


def run_trial(
    launch: Launch,
    kind: ClusterKind,
    args: Sequence[str] = (),
    *,
    watcher: Watcher | None = None,
    module: str = MODULE,
) -> Trial:
    """Start all ranks of a job with the trial in place of its script, on the way of all runs; wait for their end.

    Args:
        launch: the job.
        kind: the kind of cluster.
        args: of the trial: see :mod:`allranks.trial.__main__`.
        watcher: looks on.
        module: what the ranks run, of those that each run carries for its nodes.

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
        while not started.wait(_LOOK_SECONDS):
            watcher.news(run, started.news())
    except BaseException:  # A signal, too.
        kind.cancel(run)
        raise
    return _ended(run, plan, kind)


def tried(
    seen: Seen, results: Iterable[Result], kind: ClusterKind, launch: Launch, timeout: float, watcher: Watcher
) -> Seen:
    """Have a trial on the nodes that were looked at, unless something of them cannot work.

    Args:
        seen: what is known of them.
        results: what the checks have found.
        kind: the kind of cluster.
        launch: the job; its folder of runs gets the run of the trial.
        timeout: seconds that ranks wait for each other; what keeps them is then searched for.
        watcher: looks on.

    Returns:
        The same with the trial, or why there was none; and what GPUs have computed among the facts of their nodes.

    Raises:
        StartCancelledError: a signal came.
    """
    if not seen.nodes:
        return replace(seen, why_no_trial=seen.why_no_nodes)
    if any(result.finding.grade is Grade.FAIL for result in results):
        return replace(seen, why_no_trial="no ranks were started, since something else has failed")
    launch = replace(launch, job=_on(seen.nodes, launch.job, kind.name))
    try:
        trial = run_trial(launch, kind, ("--full", "--timeout", f"{timeout:g}"), watcher=watcher)
    except StartCancelledError:
        raise
    except AllranksError as error:
        return replace(seen, why_no_trial=error.in_a_line)
    if others := _others(seen, trial, kind.name):
        return replace(seen, why_no_trial=f"the ranks got other nodes than those that were looked at: {others}")
    nodes = tuple(_with_computed(node, trial) for node in seen.nodes)
    return replace(seen, trial=trial, nodes=nodes, search=partial(_searched, seen, kind, launch, watcher))


def _on(nodes: Sequence[Node], job: Job, kind: str) -> Job:
    """Return a job that gets just these nodes; a scheduler would give others each time."""
    if kind in _WITHOUT_A_QUEUE:
        return job
    hosts = (node.host.partition(".")[0] if kind == "pbs" else node.host for node in nodes)  # PBS knows the short name.
    return job.model_copy(
        update={
            "resources": job.resources.model_copy(update={"nodes": (len(nodes), len(nodes))}),
            "scheduler": job.scheduler.model_copy(update={"include": tuple(hosts)}),
        }
    )


def _others(seen: Seen, trial: Trial, kind: str) -> str:
    """Name the nodes that a scheduler has given in place of those that were looked at; a container has its own name."""
    if kind in _WITHOUT_A_QUEUE or seen.job.environment.container:
        return ""
    looked_at = {node.number: node.facts["host"]["name"] for node in seen.nodes if "host" in node.facts}
    given = {who.node_rank: who.host for who in trial.of(told.Who)}
    return ", ".join(host for number, host in sorted(given.items()) if host != looked_at.get(number, host))


def _searched(seen: Seen, kind: ClusterKind, launch: Launch, watcher: Watcher, least: float) -> list[Finding]:
    from allranks.preflight.searching import search

    try:
        return search(launch, kind, [node.host for node in seen.nodes], watcher=watcher, least=least)
    except StartCancelledError:
        raise
    except AllranksError as error:
        return [skipped(f"the nodes could not be searched: {error.in_a_line}")]


def _with_computed(node: Node, trial: Trial) -> Node:
    ranks = {who.rank for who in trial.of(told.Who) if who.node_rank == node.number}
    computed = [one.found for one in trial.of(told.Computed) if one.rank in ranks]
    return replace(node, facts={**node.facts, "gpu-compute": computed}) if computed else node


def trial_of(launch: Launch, kind: ClusterKind, args: Sequence[str], module: str = MODULE) -> Launch:
    """Return a job with the trial in place of what it runs, to be done once.

    Raises:
        JobError: nothing of allranks runs in the ranks of the job.
    """
    job = launch.job
    if is_used(job):
        raise JobError(
            "the test runs in the ranks, and nothing of allranks does with torch's own launcher",
            why="launch.agent is false" if not job.launch.agent else f"launch.launcher is {job.launch.launcher}",
            fix="allranks test --agent --launcher torchrun",
        )
    job = _once(job, kind.name).model_copy(
        update={"name": "test", "script": None, "binary": None, "module": module, "args": (*args,)}
    )
    return replace(launch, job=job, job_text=dump_yaml(redacted(job)))


def _once(job: Job, kind: str) -> Job:
    """Return a job that has one attempt, and ends with this command; a setting that the kind lacks would be noted."""
    time = job.resources.time
    requeue = {} if kind in _WITHOUT_A_QUEUE else {"requeue": False}
    return job.model_copy(
        update={
            "launch": job.launch.model_copy(update={"max_restarts": 0, "attach": kind == "ssh"}),
            "retry": job.retry.model_copy(update=requeue),
            "scheduler": job.scheduler.model_copy(update={"array": None}),
            "resources": job.resources.model_copy(update={"time": time and min(time, _LONGEST)}),
        }
    )


def _ended(run: Run, plan: Plan, kind: ClusterKind) -> Trial:
    if not kind.status(run).state.is_final:
        kind.cancel(run)  # Its agent was killed: see to it that no rank stays behind.
    run = settled(run, kind)
    kind.bring(run)
    size = 0 if plan.ranks_unknown or plan.min_nodes else plan.world_size
    return Trial(run, size, tuple(told.read(run.attempt_folder)))
