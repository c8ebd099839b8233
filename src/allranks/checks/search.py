"""The self-test of ``allranks check --full``, and the search for the node or link that is at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from allranks.checks.model import Finding, Grade, Trial, failed, passed, skipped, warned
from allranks.checks.selftest import run_trial, why_failed
from allranks.clusters.batch.cluster import BatchCluster
from allranks.errors import AllranksError, StartCancelledError
from allranks.job.units import format_count, format_size
from allranks.record.selftest import GpuResult, RankInfo, SearchResult

if TYPE_CHECKING:
    from allranks.checks.model import Result, Seen
    from allranks.checks.waiting import Watcher
    from allranks.clusters.base import ClusterKind
    from allranks.launch.submit import Launch

#: What one rank on each node runs.
_MODULE = "allranks.selftest.search"
_COMMANDS = "top, dmesg, ip -s link, ethtool"
#: So many links are named: where nodes of two halves do not reach each other, all links between these are bad.
_NAMED = 8


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

    def search_nodes(least: float) -> list[Finding]:
        try:
            return search(launch, kind, hosts, watcher=watcher, least=least)
        except StartCancelledError:
            raise
        except AllranksError as error:
            return [skipped(f"the nodes could not be searched: {error.in_a_line}")]

    node_of = {who.rank: who.node_rank for who in trial.of(RankInfo)}
    nodes = []
    for node in seen.nodes:
        computed = [one.found for one in trial.of(GpuResult) if node_of.get(one.rank) == node.number]
        nodes.append(replace(node, facts={**node.facts, "gpu-compute": computed}) if computed else node)
    return replace(seen, trial=trial, nodes=tuple(nodes), search=search_nodes)


def _others(seen: Seen, trial: Trial, kind: ClusterKind) -> str:
    """Name the nodes that a scheduler gave instead of those that were probed; a container has a name of its own."""
    if not isinstance(kind, BatchCluster) or seen.job.environment.container:
        return ""
    probed = {node.number: node.facts["host"]["name"] for node in seen.nodes if "host" in node.facts}
    given = {who.node_rank: who.host for who in trial.of(RankInfo)}
    return ", ".join(host for number, host in sorted(given.items()) if host != probed.get(number, host))


def search(launch: Launch, kind: ClusterKind, hosts: Sequence[str], *, watcher: Watcher, least: float) -> list[Finding]:
    """Search the nodes of a job for the one, or the link, at fault; the directory of runs gets the run of the search.

    ``least`` is how many bytes a second may be expected between two nodes at least; 0: it is unknown.

    Raises:
        AllranksError: it could not be started.
    """
    one_rank = launch.job.launch.model_copy(update={"nproc_per_node": 1})
    no_spares = launch.job.resources.model_copy(update={"spares": 0})
    launch = launch._replace(job=launch.job.model_copy(update={"launch": one_rank, "resources": no_spares}))
    trial = run_trial(launch, kind, ("--least", f"{least:g}"), module=_MODULE, watcher=watcher)
    results = trial.of(SearchResult)
    if not results:
        return [skipped(f"the search for the node or link at fault did not finish: {why_failed(trial)}")]
    names = hosts if len(hosts) == len(results[0].hosts) else results[0].hosts
    return [*findings(results[0], names)]


def findings(result: SearchResult, hosts: Sequence[str]) -> Iterator[Finding]:
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


def _link(culprit: Mapping[str, Any], exclude: str, result: SearchResult, hosts: Sequence[str]) -> Finding:
    one, other = (hosts[node] for node in culprit["nodes"])
    how, grade = _how(culprit["seconds"], culprit["error"], result), _grade(culprit["seconds"])
    fix = f"on both: {_COMMANDS}"
    if len(hosts) == 2:
        return grade(f"between {one} and {other}: {how}", fix=fix)  # Either may be the good one.
    return grade(f"between {one} and {other}, each of which does well with others: {how}", fix=fix, exclude=exclude)


def _grade(seconds: float | None) -> Callable[..., Finding]:
    return failed if seconds is None else warned


def _how(seconds: float | None, error: str, result: SearchResult) -> str:
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


def _are_all_slow(result: SearchResult) -> bool:
    return result.usual is not None and result.size / result.usual < result.least
