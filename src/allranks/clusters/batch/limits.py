"""What stands against a job before it is submitted, whichever its scheduler: limits, and nodes that are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone

from allranks.job.units import format_count, format_memory
from allranks.plan.layout import MOST_RANKS_PER_CPU
from allranks.system.hostlist import fold


@dataclass(frozen=True)
class Issue:
    """What stands against a job."""

    what: str  # What it asks for, and what there is.
    fix: str  # What the user can do.
    is_final: bool = True  # Whether it could never start; otherwise it would wait until something changes.
    is_refusal: bool = False  # Whether these are the scheduler's own words, with which it refuses a submitted job.


@dataclass(frozen=True)
class Feasibility:
    """Whether and when a job would start that is submitted now, as far as its scheduler says."""

    where: str  # What would take it: a partition, a queue.
    objections: Sequence[Issue] = ()
    start: float | None = None  # When it is expected to start, in seconds since 1970.

    @property
    def is_hopeless(self) -> bool:
        """Whether it would never start."""
        return any(objection.is_final for objection in self.objections)


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


@dataclass(frozen=True)
class Limit:
    """What a partition or queue gives a job of something, at most and at least; 0 if it does not say."""

    amount: int  # That the job asks for.
    key: str  # Of the job, that asks for it.
    words: Callable[[int], str]
    most: int = 0
    least: int = 0

    def objections(self, place: str, other: str, *, is_final: bool = True) -> Iterator[Issue]:
        """Yield what it has against the job; ``other`` is what the user can do but change the key."""
        reported = f"{self.words(self.amount)} are requested, and {place} gives a job at"
        if 0 < self.most < self.amount:
            yield Issue(f"{reported} most {self.words(self.most)}", f"lower {self.key}, or {other}", is_final)
        if 0 < self.amount < self.least:
            yield Issue(f"{reported} least {self.words(self.least)}", f"raise {self.key}, or {other}", is_final)


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
    all_nodes = [*nodes]
    candidates = [node for node in all_nodes if node.name not in requested.exclude]
    if not candidates:
        return []
    for name, key, words in (
        ("gpus", "resources.gpus_per_node", counted("GPU")),
        ("cpus", "resources.cpus_per_node", counted("CPU")),
        ("memory", "resources.memory", format_memory),
    ):
        wanted, most = getattr(requested, name), max(getattr(node, name) for node in candidates)
        if wanted > most:
            text = f"{words(wanted)} of each node are requested, and no node of {where} has more than {words(most)}"
            return [Issue(text, f"lower {key}, or choose another scheduler.partition")]
    needed = ("cpus", "memory", "gpus")
    fitting = [node for node in candidates if all(getattr(node, key) >= getattr(requested, key) for key in needed)]
    if len(fitting) < requested.nodes:
        such, of_nodes = (" such", "") if len(fitting) < len(all_nodes) else ("", f".nodes to {len(fitting)}")
        text = f"{format_count(requested.nodes, 'node')} are requested, and {where} has {len(fitting)}{such}"
        return [Issue(text, f"lower resources{of_nodes}, or choose another scheduler.partition")]
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


def reading(parse: Callable[[str], int], text: str) -> int:
    """Return a time, a size or a number; 0 if the text has none, or says that there is no limit."""
    with suppress(ValueError):
        return parse(text)
    return 0


def time_of(text: str) -> float | None:
    """Return a time in seconds since 1970; None if the text, of a number, of ISO 8601 or of ctime in UTC, has none."""
    with suppress(ValueError):
        return float(text)
    for parse in (datetime.fromisoformat, lambda ctime: datetime.strptime(ctime, "%a %b %d %H:%M:%S %Y")):
        with suppress(ValueError):
            return parse(text).replace(tzinfo=timezone.utc).timestamp()
    return None


def number(text: str) -> int:
    """Return a number; 0 if the text is not one."""
    return int(text) if text.isdecimal() else 0


def counted(noun: str) -> Callable[[int], str]:
    """Return what writes a number of such things."""
    return lambda count: format_count(count, noun)
