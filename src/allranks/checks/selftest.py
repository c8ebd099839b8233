"""The self-test, which all ranks of a job run in place of its script, and the search for the node or link at fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.checks.model import Finding, Grade, Trial, failed, passed, skipped, warned
from allranks.checks.topics.gpus import judge_computed
from allranks.clusters.batch.cluster import BatchCluster
from allranks.errors import AllranksError, JobError, StartCancelledError
from allranks.job.units import format_count, format_size
from allranks.job.variables import redacted
from allranks.job.yaml import dump_yaml
from allranks.launch import submit as launching
from allranks.launch.refresh import settled
from allranks.logs.cause import cause_of
from allranks.plan.torch_launcher import is_used
from allranks.record import selftest

if TYPE_CHECKING:
    from allranks.checks.model import Result, Seen
    from allranks.checks.waiting import Watcher
    from allranks.clusters.base import ClusterKind
    from allranks.launch.submit import Launch

#: What the ranks run: it is in the code that each run carries for its nodes.
MODULE = "allranks.selftest"
#: What one rank on each node runs, to find the node or link at fault.
_SEARCH_MODULE = "allranks.selftest.search"
_COMMANDS = "top, dmesg, ip -s link, ethtool"
#: So many links are named: where nodes of two halves do not reach each other, all links between these are bad.
_NAMED = 8
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


# --- of allranks check --full, with the search for the node or link that is at fault ---


def with_trial(
    seen: Seen, results: Iterable[Result], kind: ClusterKind, launch: Launch, timeout: float, watcher: Watcher
) -> Seen:
    """Run the self-test on the nodes that were probed, unless a check has failed; a signal raises StartCancelledError.

    Returns:
        What is known with the self-test, or why there was none; and what GPUs have computed among the facts of nodes.
    """
    if not seen.nodes:
        return replace(seen, why_no_trial=seen.why_no_nodes)
    if any(result.finding.grade is Grade.FAIL for result in results):
        return replace(seen, why_no_trial="no ranks were started, since something else has failed")
    hosts = tuple(node.host for node in seen.nodes)
    if isinstance(kind, BatchCluster):  # A scheduler would give other nodes each time.
        job = launch.job
        resources = job.resources.model_copy(update={"nodes": (len(hosts), len(hosts))})
        scheduler = job.scheduler.model_copy(update={"include": hosts})
        launch = launch._replace(job=job.model_copy(update={"resources": resources, "scheduler": scheduler}))
    try:
        trial = run_trial(launch, kind, ("--full", "--timeout", f"{timeout:g}"), watcher=watcher)
    except StartCancelledError:
        raise
    except AllranksError as error:
        return replace(seen, why_no_trial=error.in_a_line)
    if others := _others(seen, trial, kind):
        return replace(seen, why_no_trial=f"the ranks got other nodes than those that were checked: {others}")

    node_of = {who.rank: who.node_rank for who in trial.of(selftest.RankInfo)}
    nodes = []
    for node in seen.nodes:
        computed = [one.found for one in trial.of(selftest.GpuResult) if node_of.get(one.rank) == node.number]
        nodes.append(replace(node, facts={**node.facts, "gpu-compute": computed}) if computed else node)
    return replace(seen, trial=trial, nodes=tuple(nodes), search=partial(search, launch, kind, hosts, watcher))


def _others(seen: Seen, trial: Trial, kind: ClusterKind) -> str:
    """Name the nodes that a scheduler gave instead of those that were probed; a container has a name of its own."""
    if not isinstance(kind, BatchCluster) or seen.job.environment.container:
        return ""
    probed = {node.number: node.facts["host"]["name"] for node in seen.nodes if "host" in node.facts}
    given = {who.node_rank: who.host for who in trial.of(selftest.RankInfo)}
    return ", ".join(host for number, host in sorted(given.items()) if host != probed.get(number, host))


def search(
    launch: Launch, kind: ClusterKind, hosts: Sequence[str], watcher: Watcher, least: float
) -> Sequence[Finding]:
    """Search the nodes of a job for the one, or the link, at fault; the directory of runs gets the run of the search.

    ``least`` is how many bytes a second may be expected between two nodes at least; 0: it is unknown.
    """
    one_rank = launch.job.launch.model_copy(update={"nproc_per_node": 1})
    no_spares = launch.job.resources.model_copy(update={"spares": 0})
    launch = launch._replace(job=launch.job.model_copy(update={"launch": one_rank, "resources": no_spares}))
    try:
        trial = run_trial(launch, kind, ("--least", f"{least:g}"), module=_SEARCH_MODULE, watcher=watcher)
    except StartCancelledError:
        raise
    except AllranksError as error:
        return [skipped(f"the nodes could not be searched: {error.in_a_line}")]
    results = trial.of(selftest.SearchResult)
    if not results:
        return [skipped(f"the search for the node or link at fault did not finish: {why_failed(trial)}")]
    names = hosts if len(hosts) == len(results[0].hosts) else results[0].hosts
    return [*findings(results[0], names)]


def findings(result: selftest.SearchResult, hosts: Sequence[str]) -> Iterator[Finding]:
    """Yield the findings of a search; ``hosts`` are the nodes' names, in their order."""
    on_it = f"on {{}}: {_COMMANDS}"
    for node in result.silent:
        host, what = hosts[node], "no answer: it hangs, or cannot reach the first node"
        yield failed(what, fix=on_it.format(host), host=host, exclude=host)
    links = [culprit for culprit in result.culprits if len(culprit["nodes"]) == 2]
    for culprit in result.culprits:
        if culprit not in links:
            host, how = hosts[culprit["nodes"][0]], _how(culprit["seconds"], culprit["error"], result)
            what = f"with each node that it was tried with {how}"
            yield _grade(culprit["seconds"])(what, fix=on_it.format(host), host=host, exclude=host)
    ends = [node for link in links for node in link["nodes"]]
    for link in links[:_NAMED]:  # The end with most of the links is left out; the latter, where both have as many.
        leave_out = max(link["nodes"], key=lambda node: (ends.count(node), node))
        yield _link(link, hosts[leave_out], result, hosts)
    if links[_NAMED:]:
        what = f"{format_count(len(links) - _NAMED, 'further pair')} of nodes: as badly with each other"
        yield warned(what, fix="fix what is named, and search again")
    if result.more:
        what = (
            f"{format_count(result.more, 'further node')} did well with no other one, and few others were left to try"
        )
        yield warned(what, fix="fix or leave out what is named, and search again")
    how = _how(result.seconds, result.error if result.is_bad else "", result)
    if result.is_bad and not (result.culprits or result.more):
        alike = "alike" if _are_all_slow(result) else "together"
        what = f"all {format_count(len(hosts), 'node')} {alike} {how}; no node or link alone could be found at fault"
        fix = "what do they share: a switch, a firewall, an interface? Check again with half of them"
        yield _grade(result.seconds)(what, fix=fix)
    if result.is_bad or result.silent:
        return
    if result.least:  # It is known what is good.
        yield passed(f"what was slow or failed did not recur when the nodes were searched: all together {how}")
    else:
        yield skipped(f"all nodes alike {how}: none is slower than the others, and the expected speed is not known")


def _link(culprit: Mapping[str, Any], exclude: str, result: selftest.SearchResult, hosts: Sequence[str]) -> Finding:
    one, other = (hosts[node] for node in culprit["nodes"])
    how, grade = _how(culprit["seconds"], culprit["error"], result), _grade(culprit["seconds"])
    fix = f"on both: {_COMMANDS}"
    if len(hosts) == 2:
        return grade(f"between {one} and {other}: {how}", fix=fix)  # Either may be the good one.
    return grade(f"between {one} and {other}, each of which does well with others: {how}", fix=fix, exclude=exclude)


def _grade(seconds: float | None) -> Callable[..., Finding]:
    return failed if seconds is None else warned


def _how(seconds: float | None, error: str, result: selftest.SearchResult) -> str:
    how = f"at {format_size(result.size / seconds)}/s" if seconds else "nothing got through"
    if error and not seconds:
        how += f" ({error})"
    if result.backend == "nccl":
        how += ", from the first GPU of each node"
    if _are_all_slow(result):
        how += f", where {format_size(result.least)}/s may be expected"
    elif result.usual and result.is_bad:
        how += f", where others have {format_size(result.size / result.usual)}/s"
    return how


def _are_all_slow(result: selftest.SearchResult) -> bool:
    return result.usual is not None and result.size / result.usual < result.least
