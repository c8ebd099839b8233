"""Has the nodes of a job searched for the one, or the link, that makes all of them slow or fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from allranks.job.units import format_count, format_size
from allranks.preflight.judged import why_failed
from allranks.preflight.model import Finding, failed, passed, skipped, warned
from allranks.preflight.trials import run_trial
from allranks.runs.trial import Searched

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind
    from allranks.clusters.launch import Launch
    from allranks.job.spec import Job
    from allranks.preflight.watcher import Watcher

#: What one rank on each node runs.
_MODULE = "allranks.trial.search"
_LOOK = "top, dmesg, ip -s link, ethtool"
#: So many links are named: where nodes of two halves do not reach each other, all links between these are bad.
_NAMED = 8


def search(
    launch: Launch, kind: ClusterKind, hosts: Sequence[str], *, watcher: Watcher, least: float = 0.0
) -> list[Finding]:
    """Search the nodes of a job for what is at fault.

    Args:
        launch: the job; its folder of runs gets the run of the search.
        kind: the kind of cluster.
        hosts: what the job calls its nodes, in their order.
        watcher: looks on.
        least: bytes a second that may be expected between two nodes at least; 0: nobody knows.

    Raises:
        AllranksError: it could not be started.
    """
    job, args = _one_rank_per_node(launch.job), ("--least", f"{least:g}")
    trial = run_trial(replace(launch, job=job), kind, args, module=_MODULE, watcher=watcher)
    told = trial.of(Searched)
    if not told:
        return [skipped(f"the search for the node or link at fault did not come to its end: {why_failed(trial)}")]
    names = hosts if len(hosts) == len(told[0].hosts) else told[0].hosts
    return [*findings(told[0], names)]


def _one_rank_per_node(job: Job) -> Job:
    """Return a job with one rank on each node; no node is held back."""
    return job.model_copy(
        update={
            "launch": job.launch.model_copy(update={"nproc_per_node": 1}),
            "resources": job.resources.model_copy(update={"spares": 0}),
        }
    )


def findings(told: Searched, hosts: Sequence[str]) -> Iterator[Finding]:
    """Say what a search has found.

    Args:
        told: what it told.
        hosts: the nodes' names, in their order.
    """
    for node in told.silent:
        yield _on(hosts[node], failed, "it says nothing: it hangs, or cannot reach the first node")
    links = [culprit for culprit in told.culprits if len(culprit["nodes"]) == 2]
    for culprit in told.culprits:
        if culprit not in links:
            yield _node(culprit, told, hosts)
    for link in links[:_NAMED]:
        yield _link(link, _to_leave_out(link, links), told, hosts)
    if links[_NAMED:]:
        what = f"{format_count(len(links) - _NAMED, 'further pair')} of nodes: as badly with each other"
        yield warned(what, fix="put right what is named, and search again")
    if told.more:
        what = f"{format_count(told.more, 'further node')} did well with no other one, and few others were left to try"
        yield warned(what, fix="put right or leave out what is named, and search again")
    if told.is_bad and not (told.culprits or told.more):
        yield _all_together(told, hosts)
    if not (told.is_bad or told.silent):
        yield _all_well(told)


def _node(culprit: Mapping[str, Any], told: Searched, hosts: Sequence[str]) -> Finding:
    how = _how(culprit["seconds"], culprit["error"], told)
    return _on(hosts[culprit["nodes"][0]], _grade(culprit["seconds"]), f"with each node that it was tried with {how}")


def _link(culprit: Mapping[str, Any], leave_out: int, told: Searched, hosts: Sequence[str]) -> Finding:
    one, other = (hosts[node] for node in culprit["nodes"])
    how, grade = _how(culprit["seconds"], culprit["error"], told), _grade(culprit["seconds"])
    if len(hosts) == 2:
        return grade(f"between {one} and {other}: {how}", fix=f"on both: {_LOOK}")  # Either may be the good one.
    what = f"between {one} and {other}, each of which does well with others: {how}"
    return grade(what, fix=f"on both: {_LOOK}", exclude=hosts[leave_out])


def _to_leave_out(link: Mapping[str, Any], links: Sequence[Mapping[str, Any]]) -> int:
    """Return the end of a link that has most of the links; the latter, where both have as many."""
    ends = [node for each in links for node in each["nodes"]]
    end: int = max(link["nodes"], key=lambda node: (ends.count(node), node))
    return end


def _all_together(told: Searched, hosts: Sequence[str]) -> Finding:
    how = _how(told.seconds, told.error, told)
    alike = "alike" if _are_all_slow(told) else "together"
    what = f"all {format_count(len(hosts), 'node')} {alike} {how}; no node or link alone could be found at fault"
    fix = "what do they share: a switch, a firewall, an interface? Check again with half of them"
    return _grade(told.seconds)(what, fix=fix)


def _all_well(told: Searched) -> Finding:
    """Say that nothing stands out: that is good where it is known what is good."""
    how = _how(told.seconds, "", told)
    if told.least:
        return passed(f"what was slow or failed did not come again when the nodes were searched: all together {how}")
    return skipped(f"all nodes alike {how}: none is slower than the others, and what they should do is not known")


def _grade(seconds: float | None) -> Callable[..., Finding]:
    return failed if seconds is None else warned


def _on(host: str, grade: Callable[..., Finding], what: str) -> Finding:
    return grade(what, fix=f"on {host}: {_LOOK}", host=host, exclude=host)


def _how(seconds: float | None, error: str, told: Searched) -> str:
    how = f"at {_rate(told.size, seconds)}" if seconds else "nothing got through"
    gpus = ", from the first GPU of each node" if told.backend == "nccl" else ""
    return f"{how}{f' ({error})' if error and not seconds else ''}{gpus}{_beside(told)}"


def _beside(told: Searched) -> str:
    if _are_all_slow(told):
        return f", where {format_size(told.least)}/s may be expected"
    return f", where others have {_rate(told.size, told.usual)}" if told.usual and told.is_bad else ""


def _are_all_slow(told: Searched) -> bool:
    return told.usual is not None and told.size / told.usual < told.least


def _rate(size: int, seconds: float) -> str:
    return f"{format_size(size / seconds)}/s"
