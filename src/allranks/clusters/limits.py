"""What a scheduler can have against a job, whichever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from allranks.clusters.outlook import Objection
from allranks.hostlist import fold
from allranks.job.units import format_count, format_memory


@dataclass(frozen=True)
class Asked:
    """What a job asks for, as far as limits go. Time is in seconds, memory in bytes; 0: it does not say.

    Attributes:
        partitions: names of partitions or queues, any of which will do.
        nodes: the least number of nodes.
        time: the time limit.
        qos: quality of service.
        cpus: CPUs of each node.
        memory: memory of each node.
        gpus: GPUs of each node.
        exclude: nodes that must not be.
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
    """A node: its state in the scheduler's word, what it has, and why it is away. Memory is in bytes.

    Attributes:
        name: of the node.
        state: its state.
        is_away: whether it takes no job now.
        cpus: its CPUs.
        memory: its memory.
        gpus: its GPUs.
        reason: why it is away, where somebody has said so.
    """

    name: str
    state: str
    is_away: bool
    cpus: int
    memory: int
    gpus: int
    reason: str = ""


def least(places: Iterable[list[Objection]]) -> list[Objection]:
    """Return what stands against a job in the one of several places where that is least.

    That is where nothing is final; else where nobody sees what it is; else the first.
    """
    return min(places, key=_weight, default=[])


def _weight(against: list[Objection]) -> int:
    if not against:
        return 1
    return 2 if any(objection.is_final for objection in against) else 0


def missing(asked: Asked, where: str, nodes: Iterable[NodeInfo], more: str) -> list[Objection]:
    """Return why nodes are not those that a job needs; nothing where that cannot be seen.

    Args:
        asked: what it asks for.
        where: what to call those that have the nodes, such as ``partition main``.
        nodes: the nodes.
        more: the command that tells why nodes are away.
    """
    all_nodes = [*nodes]
    candidates = [node for node in all_nodes if node.name not in asked.exclude]
    if not candidates:
        return []
    if too_much := next(_too_much(asked, candidates), None):
        of_each, key, most = too_much
        text = f"{of_each} of each node are asked for, and no node of {where} has more than {most}"
        return [Objection(text, f"lower {key}, or choose another scheduler.partition")]
    fitting = [node for node in candidates if _fits(asked, node)]
    if len(fitting) < asked.nodes:
        such, of_nodes = (" such", "") if len(fitting) < len(all_nodes) else ("", f".nodes to {len(fitting)}")
        text = f"{format_count(asked.nodes, 'node')} are asked for, and {where} has {len(fitting)}{such}"
        return [Objection(text, f"lower resources{of_nodes}, or choose another scheduler.partition")]
    away = [node for node in fitting if node.is_away]
    if not away:
        return []
    reason = next((f" ({node.reason})" for node in away if node.reason), "")
    told = f"{fold(node.name for node in away)} {'are' if len(away) > 1 else 'is'} {away[0].state}{reason}"
    fix = f"ask for fewer nodes, or wait; {more} tells why"
    return [Objection(f"too few of its nodes are up now: {told}", fix, is_final=False)]


def _fits(asked: Asked, node: NodeInfo) -> bool:
    return node.cpus >= asked.cpus and node.memory >= asked.memory and node.gpus >= asked.gpus


def _too_much(asked: Asked, nodes: Sequence[NodeInfo]) -> Iterator[tuple[str, str, str]]:
    """Yield what no node has enough of: how much is asked for, by which key, and the most that a node has."""
    things = (
        (asked.gpus, max(node.gpus for node in nodes), "resources.gpus_per_node", counted("GPU")),
        (asked.cpus, max(node.cpus for node in nodes), "resources.cpus_per_node", counted("CPU")),
        (asked.memory, max(node.memory for node in nodes), "resources.memory", format_memory),
    )
    for wanted, most, key, words in things:
        if wanted > most:
            yield words(wanted), key, words(most)


def reading(parse: Callable[[str], int], text: str) -> int:
    """Return what a text says of a time or of memory; 0 where it says nothing, or that there is no limit."""
    with suppress(ValueError):
        return parse(text)
    return 0


def number(text: str) -> int:
    """Return a number; 0 where a text is none."""
    return int(text) if text.isdecimal() else 0


def counted(noun: str) -> Callable[[int], str]:
    """Return what writes a number of such things."""
    return lambda count: format_count(count, noun)
