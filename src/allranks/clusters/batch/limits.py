"""What stands against a job before it is submitted, whichever its scheduler: limits, and nodes that are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from allranks.clusters.base import Issue
from allranks.job.units import format_count, format_duration, format_memory
from allranks.plan.layout import MOST_RANKS_PER_CPU
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


#: What a job asks for: the keys for it, and the noun that is counted, or what writes an amount.
_ASKED: dict[str, tuple[str, str | Callable[[int], str]]] = {
    "time": ("resources.time", format_duration),
    "nodes": ("resources.nodes", "node"),
    "cpus": ("resources.cpus_per_node", "CPU"),
    "gpus": ("resources.gpus_per_node", "GPU"),
    "memory": ("resources.memory", format_memory),
    "cpus in all": ("resources.cpus_per_node or resources.nodes", "CPU"),
    "gpus in all": ("resources.gpus_per_node or resources.nodes", "GPU"),
}


def _amount(of: str, amount: int) -> str:
    words = _ASKED[of][1]
    return format_count(amount, words) if isinstance(words, str) else words(amount)


def beyond(
    of: str, amount: int, place: str, other: str, *, most: int = 0, least: int = 0, is_final: bool = True
) -> Iterator[Issue]:
    """Yield what stands against so much ``of`` something in a place that gives a job at most and at least so much.

    A limit of 0 is none. ``other`` is what the user can do but change the key.
    """
    has = f"{_amount(of, amount)} are requested, and {place} gives a job at"
    if 0 < most < amount:
        yield Issue(f"{has} most {_amount(of, most)}", f"lower {_ASKED[of][0]}, or {other}", is_final)
    if 0 < amount < least:
        yield Issue(f"{has} least {_amount(of, least)}", f"raise {_ASKED[of][0]}, or {other}", is_final)


def least(places: Iterable[list[Issue]]) -> list[Issue]:
    """Return what stands against a job in that of several places where it is least.

    That is where nothing is final; else where no cause is visible; else the first.
    """

    def weight(against: list[Issue]) -> int:
        return 2 * any(objection.is_final for objection in against) if against else 1

    return min(places, key=weight, default=[])


def missing(requested: Requested, where: str, nodes: Iterable[NodeInfo], more: str) -> list[Issue]:
    """Return why the nodes of ``where`` are not those that a job needs; empty if no cause is visible.

    ``more`` is the command that shows why nodes are away.
    """
    all_nodes, needed, other = [*nodes], ("gpus", "cpus", "memory"), "or choose another scheduler.partition"
    candidates = [node for node in all_nodes if node.name not in requested.exclude]
    if not candidates:
        return []
    for of in needed:
        wanted, most = getattr(requested, of), max(getattr(node, of) for node in candidates)
        if wanted > most:
            has = f"{_amount(of, wanted)} of each node are requested, and no node of {where} has more than"
            return [Issue(f"{has} {_amount(of, most)}", f"lower {_ASKED[of][0]}, {other}")]
    fitting = [node for node in candidates if all(getattr(node, of) >= getattr(requested, of) for of in needed)]
    if len(fitting) < requested.nodes:
        such, to = (" such", "") if len(fitting) < len(all_nodes) else ("", f".nodes to {len(fitting)}")
        text = f"{_amount('nodes', requested.nodes)} are requested, and {where} has {len(fitting)}{such}"
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
    limit = f"more than {MOST_RANKS_PER_CPU} ranks on each CPU make no progress"
    return [Issue(f"{ranks} ranks on each node are requested, and {has}: {limit}", f"--nproc-per-node {most}")]
