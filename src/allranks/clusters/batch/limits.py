"""What stands against a job before it is submitted, whichever its scheduler: limits, and nodes that are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from allranks.clusters.base import Issue
from allranks.job.units import format_count, format_duration, format_memory
from allranks.plan.layout import CROWDED, MOST_RANKS_PER_CPU
from allranks.system.hostlist import fold


@dataclass(frozen=True)
class Requested:
    """What a job asks for, as far as limits go. Time is in seconds, memory in bytes; 0 if it does not say.

    Any of the partitions, or queues, will do. ``nodes`` is the least number of nodes; the amounts are for each of them.
    """

    partitions: tuple[str, ...] = ()
    nodes: int = 1
    time: int = 0
    qos: str = ""
    cpus: int = 0
    memory: int = 0
    gpus: int = 0
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeInfo:
    """A node: its state in the scheduler's word, whether it takes no job now and why, and what it has."""

    name: str
    state: str
    is_away: bool
    cpus: int
    memory: int
    gpus: int
    reason: str = ""


_CPUS, _GPUS = partial(format_count, noun="CPU"), partial(format_count, noun="GPU")
#: What a job asks for: the keys for it, and how an amount of it is written.
_REQUESTS: dict[str, tuple[str, Callable[[int], str]]] = {
    "time": ("resources.time", format_duration),
    "nodes": ("resources.nodes", partial(format_count, noun="node")),
    "cpus": ("resources.cpus_per_node", _CPUS),
    "gpus": ("resources.gpus_per_node", _GPUS),
    "memory": ("resources.memory", format_memory),
    "cpus in all": ("resources.cpus_per_node or resources.nodes", _CPUS),
    "gpus in all": ("resources.gpus_per_node or resources.nodes", _GPUS),
}


def beyond(
    of: str, amount: int, place: str, other: str, *, most: int = 0, least: int = 0, is_final: bool = True
) -> Iterator[Issue]:
    """Yield what stands against so much ``of`` something in a place that gives a job at most and at least so much.

    A limit of 0 is none. ``other`` is what the user can do but change the key.
    """
    key, written = _REQUESTS[of]
    has = f"{written(amount)} are requested, and {place} gives a job at"
    if 0 < most < amount:
        yield Issue(f"{has} most {written(most)}", f"lower {key}, or {other}", is_final)
    if 0 < amount < least:
        yield Issue(f"{has} least {written(least)}", f"raise {key}, or {other}", is_final)


def least(places: Iterable[list[Issue]], *, takes: bool) -> list[Issue]:
    """Return what stands against a job in that of several places where it is least: where nothing is final.

    A place with nothing against it ``takes`` it; else no cause is visible there, which is worse than one that passes.
    """
    of_none = -1 if takes else 1
    return min(places, key=lambda each: 2 * any(issue.is_final for issue in each) if each else of_none, default=[])


def missing(requested: Requested, where: str, nodes: Iterable[NodeInfo], more: str) -> list[Issue]:
    """Return why the nodes of ``where`` are not those that a job needs; empty if no cause is visible.

    ``more`` is the command that shows why nodes are away.
    """
    all_nodes, needed, other = [*nodes], ("gpus", "cpus", "memory"), "or choose another scheduler.partition"
    candidates = [node for node in all_nodes if node.name not in requested.exclude]
    if not candidates:
        return []
    for of in needed:
        key, written = _REQUESTS[of]
        wanted, most = getattr(requested, of), max(getattr(node, of) for node in candidates)
        if wanted > most:
            has = f"{written(wanted)} of each node are requested, and no node of {where} has more than"
            return [Issue(f"{has} {written(most)}", f"lower {key}, {other}")]
    fitting = [node for node in candidates if all(getattr(node, of) >= getattr(requested, of) for of in needed)]
    if len(fitting) < requested.nodes:
        such, to = (" such", "") if len(fitting) < len(all_nodes) else ("", f".nodes to {len(fitting)}")
        text = f"{format_count(requested.nodes, 'node')} are requested, and {where} has {len(fitting)}{such}"
        return [Issue(text, f"lower resources{to}, {other}")]
    away = [node for node in fitting if node.is_away]
    if not away:
        return []
    reason = next((f" ({node.reason})" for node in away if node.reason), "")
    reported = f"{fold(node.name for node in away)} {'are' if len(away) > 1 else 'is'} {away[0].state}{reason}"
    fix = f"ask for fewer nodes, or wait; {more} shows why"
    return [Issue(f"too few of its nodes are up now: {reported}", fix, is_final=False)]


def crowded(ranks: int, where: str, nodes: Iterable[NodeInfo]) -> list[Issue]:
    """Return that so many ranks are too many for the largest node of ``where``; empty if they are not."""
    most = max((node.cpus for node in nodes), default=0)
    if not 0 < most * MOST_RANKS_PER_CPU < ranks:
        return []
    has = f"no node of {where} has more than {format_count(most, 'CPU')}"
    return [Issue(f"{ranks} ranks on each node are requested, and {has}: {CROWDED}", f"--nproc-per-node {most}")]
