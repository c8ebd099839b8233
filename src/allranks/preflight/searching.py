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

#: What one rank on each node runs.
_MODULE = "allranks.trial.search"
_LOOK = "top, dmesg, ip -s link, ethtool"


def search(launch: Launch, kind: ClusterKind, hosts: Sequence[str], args: Sequence[str] = ()) -> list[Finding]:
    """Search the nodes of a job for what is at fault.

    Args:
        launch: the job; its folder of runs gets the run of the search.
        kind: the kind of cluster.
        hosts: what the job calls its nodes, in their order.
        args: of the search: see :mod:`allranks.trial.search`.

    Raises:
        AllranksError: it could not be started.
    """
    trial = run_trial(replace(launch, job=_one_rank_per_node(launch.job)), kind, args, module=_MODULE)
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
    for culprit in told.culprits:
        yield _culprit(culprit, told, hosts)
    if told.more:
        what = f"{format_count(told.more, 'further pair')} of nodes do as badly with each other"
        yield warned(what, fix="put right what is named, and search again")
    if told.is_bad and not told.culprits:
        yield _all_together(told, hosts)
    if not (told.is_bad or told.silent):
        yield passed("what was slow or failed did not come again when the nodes were searched")


def _culprit(culprit: Mapping[str, Any], told: Searched, hosts: Sequence[str]) -> Finding:
    names = [hosts[node] for node in culprit["nodes"]]
    how = _how(culprit["seconds"], culprit["error"], told)
    grade = failed if culprit["seconds"] is None else warned
    if len(names) == 1:
        return _on(names[0], grade, f"with each node that it was tried with {how}")
    others = "" if len(hosts) == 2 else ", each of which does well with others"
    what, fix = f"between {names[0]} and {names[1]}{others}: {how}", f"on both: {_LOOK}"
    return grade(what, fix=fix, exclude=names[1])


def _all_together(told: Searched, hosts: Sequence[str]) -> Finding:
    how = _how(told.seconds, told.error, told)
    what = f"all {format_count(len(hosts), 'node')} together {how}; no node or link alone could be found at fault"
    fix = "what do they share: a switch, a firewall, an interface? Check again with half of them"
    return (failed if told.seconds is None else warned)(what, fix=fix)


def _on(host: str, grade: Callable[..., Finding], what: str) -> Finding:
    return grade(what, fix=f"on {host}: {_LOOK}", host=host, exclude=host)


def _how(seconds: float | None, error: str, told: Searched) -> str:
    usual = f", where others have {_rate(told.size, told.usual)}" if told.usual else ""
    if seconds is None:
        return f"nothing got through ({error}){usual}" if error else f"nothing got through{usual}"
    return f"at {_rate(told.size, seconds)}{usual}"


def _rate(size: int, seconds: float) -> str:
    return f"{format_size(size / seconds)}/s"
