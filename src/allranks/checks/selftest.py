"""The self-test on all ranks of a job: runs it in place of the script, and evaluates what the ranks report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.checks.model import Grade, Trial
from allranks.checks.topics.gpus import judge_computed
from allranks.clusters.batch.cluster import BatchCluster
from allranks.errors import JobError
from allranks.job.units import format_count
from allranks.job.variables import redacted
from allranks.job.yaml import dump_yaml
from allranks.launch import submit as launching
from allranks.launch.refresh import settled
from allranks.logs.cause import cause_of
from allranks.plan.torch_launcher import is_used
from allranks.record import selftest

if TYPE_CHECKING:
    from allranks.checks.waiting import Watcher
    from allranks.clusters.base import ClusterKind
    from allranks.launch.submit import Launch

#: What the ranks run: it is in the code that each run carries for its nodes.
MODULE = "allranks.selftest"
#: Time limit in seconds: a job of days waits in a queue longer than one of minutes.
_LONGEST = 15 * 60
_POLL_SECONDS = 0.02
#: Largest relative difference between the loss of all ranks and that of one process: other sums are rounded otherwise,
#: in float64.
TOLERANCE = 1e-9
#: Where ranks exit after success; and how many groups of ranks that ended elsewhere are named.
_AT_THE_END, _GROUPS = "at the end", 3


def run_trial(
    launch: Launch, kind: ClusterKind, args: Sequence[str], *, watcher: Watcher, module: str = MODULE
) -> Trial:
    """Run all ranks of a job with a module of ours instead of its script, and wait until they have exited.

    Raises:
        AllranksError: it could not be started. One that was started and failed is returned.
    """
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
    return Trial(run, size, tuple(selftest.read(run.attempt_folder)))


def trial_of(launch: Launch, kind: ClusterKind, args: Sequence[str], module: str) -> Launch:
    """Return a launch with the self-test instead of the script, in one attempt that ends with this command.

    Raises:
        JobError: the job uses torch's own launcher.
    """
    job = launch.job
    if is_used(job):
        raise JobError(
            "the self-test needs allranks' agent, and torch's own launcher starts ranks without it",
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
            "notify": type(job.notify)(),
            "resources": job.resources.model_copy(update={"time": time and min(time, _LONGEST)}),
        }
    )
    return launch._replace(job=job, job_text=dump_yaml(redacted(job)))


# --- what is wrong, on which ranks, and how fast it was ---


@dataclass(frozen=True)
class PartResult:
    """A part of a self-test: what is wrong, or why it was not run, and what was measured, in seconds and bytes."""

    #: ranks, collective, bandwidth, link, training or gpus.
    kind: str
    name: str
    wrong: str = ""
    why_not: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {"kind": self.kind, "name": self.name, "wrong": self.wrong, "why_not": self.why_not, **self.figures}


def judged(trial: Trial) -> list[PartResult]:
    """Return all parts of a self-test that at least one rank has reported; that of the ranks, if it succeeded."""
    if not (trial.reports or trial.has_succeeded):
        return []
    parts = (_collectives, _bandwidths, _links, _trainings, _computed)
    return [_ranks(trial), *chain.from_iterable(part(trial) for part in parts)]


def _ranks(trial: Trial) -> PartResult:
    """Judge whether all ranks have found each other."""
    reports = trial.of(selftest.RankInfo)
    size, found = trial.world_size or len(reports), [who.rank for who in reports]
    sizes = {who.world_size for who in reports}
    wrong = ""
    if not reports:
        wrong = "no rank reported anything: does this machine see what they write?"
    elif sizes != {size}:
        wrong = f"there must be {format_count(size, 'rank')}, and they see {' or '.join(map(str, sorted(sizes)))}"
    elif trial.has_succeeded and found != list(range(size)):  # Where one failed, that is what there is to say.
        wrong = f"ranks 0 to {size - 1} must report once each, and these did: {', '.join(map(str, found))}"
    return PartResult("ranks", "ranks", wrong, figures={"ranks": len(reports), "hosts": len(set(trial.hosts.values()))})


def _collectives(trial: Trial) -> Iterator[PartResult]:
    for name, reports in _grouped(trial.of(selftest.Collective), lambda one: one.name):
        times = [one.seconds for one in reports if one.seconds is not None]
        why_not = next((one.why_not for one in reports if one.why_not), "")
        figures = {"seconds": max(times)} if times else {}
        yield PartResult(
            "collective", name, on_ranks(trial, {one.rank: one.wrong for one in reports}), why_not, figures
        )


def _bandwidths(trial: Trial) -> Iterator[PartResult]:
    """Judge by size; busbw is the speed of the slowest link that would take so long, whatever the number of ranks.

    See doc/PERFORMANCE.md of github.com/NVIDIA/nccl-tests.
    """
    count = len(trial.of(selftest.RankInfo))
    for size, reports in _grouped(trial.of(selftest.Bandwidth), lambda one: one.size):
        seconds = max(one.seconds for one in reports)
        algbw = size / seconds
        figures = {"bytes": size, "seconds": seconds, "algbw": algbw, "busbw": algbw * 2 * (count - 1) / count}
        wrong = on_ranks(trial, {one.rank: one.wrong for one in reports})
        amount = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        yield PartResult("bandwidth", f"all_reduce of {amount}", wrong, figures=figures)


def _links(trial: Trial) -> Iterator[PartResult]:
    for one in trial.of(selftest.Link):
        ends = (trial.name(one.rank), trial.name(one.target))
        figures = {
            "ranks": [one.rank, one.target],
            "hosts": [trial.hosts.get(rank, f"rank {rank}") for rank in (one.rank, one.target)],
            "bytes": one.size,
            "bandwidth": one.size / one.seconds,
        }
        yield PartResult("link", " to ".join(ends), figures=figures)


def _trainings(trial: Trial) -> Iterator[PartResult]:
    for strategy, reports in _grouped(trial.of(selftest.TrainingResult), lambda one: one.strategy):
        first = reports[0]
        figures = {
            "steps": len(first.losses),
            "losses": list(first.losses),
            "steps_per_second": min(one.steps_per_second for one in reports),
        }
        hashes = [one.weights for one in reports]
        usual = max(hashes, key=hashes.count)
        words = "the weights are not those of the other ranks"
        wrong = on_ranks(trial, {one.rank: _wrong_training(one) for one in reports})
        wrong = wrong or on_ranks(trial, {one.rank: "" if one.weights == usual else words for one in reports})
        yield PartResult("training", f"training ({strategy})", wrong, figures=figures)


def _computed(trial: Trial) -> Iterator[PartResult]:
    reports = _grouped(trial.of(selftest.GpuResult), lambda one: trial.hosts[one.rank])
    for found in judge_computed({host: [one.found for one in ones] for host, ones in reports}):
        wrong = found.what if found.grade is Grade.FAIL else ""
        yield PartResult("gpus", f"GPUs of {found.host}", wrong, figures={"what": found.what})


def _wrong_training(report: selftest.TrainingResult) -> str:
    for step, (together, alone) in enumerate(zip(report.losses, report.alone, strict=True)):
        if not math.isclose(together, alone, rel_tol=TOLERANCE):
            return f"the loss of step {step} must be {alone:.7g}, as in one process, and is {together:.7g}"
    if not report.losses[-1] < report.losses[0]:
        return f"the loss must fall, and goes from {report.losses[0]:.4g} to {report.losses[-1]:.4g}"
    return ""


def why_failed(trial: Trial) -> str:
    """Return how a self-test failed, with the error of the rank that failed first."""
    status, folder = trial.run.record.status, trial.run.attempt_folder
    reason = status.reason or status.state.value
    logs = folder.glob(f"*/{contract.rank_log(status.rank, 'err')}") if status.rank is not None else ()
    words = next(filter(None, map(cause_of, logs)), None)
    return f"{reason}: {words}" if words else reason


def where(trial: Trial) -> str:
    """Return what ranks were doing when they exited, smallest groups first; empty if all came to the end."""
    places: dict[str, list[int]] = {}
    for rank in range(max([trial.world_size, *(who.rank + 1 for who in trial.of(selftest.RankInfo))])):
        places.setdefault(_place([one for one in trial.reports if one.rank == rank]), []).append(rank)
    if list(places) == [_AT_THE_END]:
        return ""
    groups = []
    for place, ranks in sorted(places.items(), key=lambda group: len(group[1]))[:_GROUPS]:
        groups.append(f"{trial.name(ranks[0]) if len(ranks) == 1 else format_count(len(ranks), 'rank')} {place}")
    return "; ".join(groups)


def _place(reports: Sequence[selftest.SelfTestReport]) -> str:
    if not reports:
        return "not there yet"
    if isinstance(reports[-1], selftest.Done):
        return _AT_THE_END
    begun = [one.name for one in reports if isinstance(one, selftest.OperationStarted)]
    return f"in {begun[-1]}" if begun else "at the start"


def on_ranks(trial: Trial, wrong: Mapping[int, str]) -> str:
    """Summarise errors by rank (empty: none): the first one with its rank, and the number of others."""
    bad = {rank: words for rank, words in wrong.items() if words}
    if not bad:
        return ""
    first, words = next(iter(bad.items()))
    if len(bad) == len(wrong) > 1:
        return f"on all ranks; on {trial.name(first)}: {words}"
    more = f" and {format_count(len(bad) - 1, 'other')}" if len(bad) > 1 else ""
    return f"on {trial.name(first)}{more}: {words}"


def _grouped(reports: Sequence[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    """Group reports by a key, in their order."""
    groups: dict[Any, list[Any]] = {}
    for one in reports:
        groups.setdefault(key(one), []).append(one)
    return list(groups.items())
