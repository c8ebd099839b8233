"""Finds stragglers: ranks for which the others wait, since when, and in which phase of the step.

All ranks make their steps together, so each step takes as long as on the slowest rank. A rank's own time is its step
time without the wait for others. A rank is reported if its own time, or its wait for data, is well above the median of
the others over many steps, by far more than its own variation. Slow GPUs are found by their clocks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from allranks.job.units import format_span
from allranks.record.steptime import NEWEST, PHASES, Window
from allranks.runs.agents import local_ranks
from allranks.runs.steptime import RankTimes, of_start, per_step, read
from allranks.runs.usage import Workers, node_usage, slow_gpus, workers_of

#: Most parts into which the steps are divided, and the fewest slow parts in a row.
_MOST_PARTS, _FEWEST_PARTS = 48, 11
_FEWEST_STEPS = 10
#: A rank is slow if its own time exceeds that of the others by this factor, and the difference this part of the step.
_FACTOR, _SHARE = 1.15, 0.05
#: A part in which a rank is not slow cancels this many in which it is.
_AGAINST = 2
#: Standard errors by which a rank must differ. High, because the maximum over many ranks and spans is compared.
_SURE = 6.0
#: Least assumed relative noise of own times from one part to the next. And the factor between the median difference of
#: neighbours and the standard deviation of a normal distribution: 2 ** 0.5 times its third quartile.
_LEAST_NOISE, _MEDIAN_DIFFERENCE = 0.02, 0.9539
#: Part of the time that a rank waits for a CPU, beyond the others' part, from which on it is reported.
_MUCH_QUEUED = 0.1
#: A node's link is slow if its send queue is busy for this many times the part of the time on the other nodes, and the
#: exchange takes at least this part of the step; samples older than this many seconds are ignored.
_QUEUE_FACTOR, _MUCH_EXCHANGE, _OLD = 1.5, 0.2, 30.0
_DATA, _EXCHANGE = PHASES.index("data"), PHASES.index("exchange")


@dataclass(frozen=True)
class Straggler:
    """Ranks of one node for which the others wait.

    Attributes:
        ranks: one rank, or all ranks of a node.
        node: number of their node.
        host: name of the node, if known.
        phase: the one of ``PHASES`` that takes longer than on the others; ``exchange``: their link is slow.
        first, steps: number of steps before it began, and of steps that it lasted.
        seconds: seconds of the phase in each step.
        others: median of the other ranks' seconds; for a slow link, of the other nodes' ``queued``.
        step: seconds per step.
        is_current: whether it lasts until the newest step.
        queued: part of the time that its main thread waited for a CPU, if much more than on others; for a slow link,
           part of the time that packets waited to be sent.
        clocks: clock of its GPU and of the others if its GPU is slow; else empty.
        workers: its data-loader workers, if it waits for data and they are known.
    """

    ranks: tuple[int, ...]
    node: int
    host: str | None
    phase: str
    first: int
    steps: int
    seconds: float
    others: float
    step: float
    is_current: bool
    queued: float = 0.0
    clocks: str = ""
    workers: Workers | None = None

    @property
    def sentence(self) -> str:
        """The message: which ranks, in which phase, and the numbers."""
        if len(self.ranks) == 1:
            who, ending, they, gpus = f"rank {self.ranks[0]}", "s", "it", "its GPU runs"
        else:
            every = "both" if len(self.ranks) == 2 else f"all {len(self.ranks)}"
            who, ending, they, gpus = f"{every} ranks", "", "they", "their GPUs run"
        if self.host:
            who += f" on {self.host}"
        elif len(self.ranks) > 1:
            who += f" of node {self.node}"
        if self.phase == "compute":
            does = f"compute{ending} {self.seconds / max(self.others, 1e-9):.1f} times slower"
        elif self.phase == "exchange":
            return (
                f"{who} exchange{ending} gradients over a slow link: packets wait to be sent {100 * self.queued:.0f} % "
                f"of the time, on the others {100 * self.others:.0f} %; "
                f"{format_span(self.seconds)} of each step of {format_span(self.step)}"
            )
        elif self.phase == "data":
            does = f"wait{ending} for data"
        else:
            what = {"optimizer": "in the optimizer", "checkpoint": "on checkpoints"}
            does = f"take{ending} longer {what.get(self.phase, 'between the steps')}"
        mine, others, step = (format_span(each) for each in (self.seconds, self.others, self.step))
        evidence = [
            f"{gpus} at {self.clocks}" if self.clocks else "",
            str(self.workers) if self.workers else "",
            f"{they} wait{ending} for a CPU {100 * self.queued:.0f} % of the time" if self.queued else "",
            f"{mine} of each step of {step}, the others {others}",
        ]
        return f"{who} {does} for {self.steps} steps: {'; '.join(filter(None, evidence))}"


def inspect(attempt: Path) -> tuple[list[str], dict[int, list[float]]]:
    """Return sentences on the stragglers in the last two minutes of an attempt, the worst first, and on slow GPUs.

    And by node the own seconds per step of its ranks.
    """
    ranks = of_start(read(attempt, newest=NEWEST))
    found, gpus = explained([one for one in find(ranks) if one.is_current], ranks, attempt)
    own = dict[int, list[float]]()
    for each in ranks:
        newest = each.windows[-1]
        own.setdefault(each.node, []).append((newest.seconds - newest.spent[_EXCHANGE]) / newest.steps)
    return [*(one.sentence for one in found), *gpus], own


def find(ranks: Sequence[RankTimes]) -> list[Straggler]:
    """Return the stragglers of ranks that were started together, the worst first."""
    edges = _edges([each.windows for each in ranks])
    if len(ranks) < 2 or not edges:
        return []
    spent = [per_step(each.windows, edges) for each in ranks]
    found = [_straggler(ranks, at, span, spent, edges) for at, span in _slow_spans(spent).items()]
    return sorted(_by_node(found, ranks), key=lambda one: one.others - one.seconds)


def explained(
    found: Iterable[Straggler], ranks: Sequence[RankTimes], attempt: Path
) -> tuple[list[Straggler], list[str]]:
    """Add hosts, GPUs, workers and links to stragglers, from the samples of an attempt's nodes.

    Returns:
        The stragglers, and sentences on slow GPUs of nodes that have none among them.
    """
    samples = {one["node"]: one for one in node_usage(attempt)}
    slow = {one.node: one for one in slow_gpus(samples.values())}
    local = {node: local_ranks(attempt, node) for node in slow}
    stragglers = list[Straggler]()
    links = _slow_links(ranks, samples)
    # Another finding on their ranks is kept if it takes longer.
    shorter = {one.node: one.seconds for one in links}
    found = [one for one in found if one.seconds - one.others >= shorter.get(one.node, 0.0)]
    for one in [*found, *links]:
        if one.node in samples:
            one = replace(one, host=samples[one.node]["host"])
        if one.phase == "data":
            one = replace(one, workers=workers_of(attempt, samples, {one.node: one.ranks}))
        gpus = slow.get(one.node)
        if one.is_current and gpus and any(local[one.node].get(number) in one.ranks for number in gpus.numbers):
            one = replace(one, clocks=gpus.clocks)
        stragglers.append(one)
    named = {one.node for one in stragglers if one.clocks}
    return stragglers, [one.sentence(local[one.node]) for one in slow.values() if one.node not in named]


def _slow_links(ranks: Sequence[RankTimes], samples: Mapping[int, Mapping[str, Any]]) -> list[Straggler]:
    """Return the ranks of a node whose link slows the exchange: its packets queue, and those of other nodes do not.

    The exchange takes equally long on all ranks, so their own times do not show it. A node that sends more than the
    others, for example because it writes checkpoints, is not reported.
    """
    newest = {one.node: _spent_last(one.windows) for one in ranks}
    times = [one["time"] for one in samples.values()]
    nodes = [one for node, one in samples.items() if node in newest and one["time"] >= max(times) - _OLD]
    queued = [one["net_queued"] or 0.0 for one in nodes]
    if len(nodes) < 2 or min(steps for steps, _ in newest.values()) < _FEWEST_STEPS:
        return []
    worst = nodes[queued.index(max(queued))]
    others = statistics.median(one["net_queued"] or 0.0 for one in nodes if one is not worst)
    usual = statistics.median(one["net_out"] or 0.0 for one in nodes if one is not worst)
    is_slow = max(queued) >= _QUEUE_FACTOR * others + _MUCH_QUEUED and (worst["net_out"] or 0.0) <= 2 * usual
    node = worst["node"]
    steps, spent = newest[node]
    if not is_slow or spent[_EXCHANGE] < _MUCH_EXCHANGE * sum(spent):
        return []
    here = [one for one in ranks if one.node == node]
    return [
        Straggler(
            ranks=tuple(one.rank for one in here),
            node=node,
            host=None,
            phase="exchange",
            first=here[0].windows[-1].first + here[0].windows[-1].steps - steps,
            steps=steps,
            seconds=spent[_EXCHANGE],
            others=others,
            step=sum(spent),
            is_current=True,
            queued=max(queued),
        )
    ]


def _spent_last(windows: Sequence[Window]) -> tuple[int, list[float]]:
    """Return the number of steps of the newest windows, and the seconds per step in each phase."""
    last = windows[-2 * _FEWEST_PARTS :]
    steps = sum(one.steps for one in last)
    return steps, [sum(seconds) / steps for seconds in zip(*(one.spent for one in last), strict=True)]


def _edges(ranks: Sequence[Sequence[Window]]) -> list[int]:
    """Return the step numbers that divide the time into parts to compare; empty if it is too early."""
    low = max((windows[0].first for windows in ranks), default=0)
    high = min((windows[-1].first + windows[-1].steps for windows in ranks), default=0)
    # Parts of equal numbers of steps and about two windows or more, so that one slow step does not count several times.
    within = [sum(low <= one.first and one.first + one.steps <= high for one in windows) for windows in ranks]
    parts = min([_MOST_PARTS, *(count // 2 for count in within)])
    if parts < _FEWEST_PARTS or high - low < _FEWEST_STEPS:
        return []
    return [low + (high - low) * part // parts for part in range(parts + 1)]


def _slow_spans(spent: Sequence[Sequence[Sequence[float]]]) -> dict[int, tuple[int, int]]:
    """Return the first and end part in which a rank is slow, by its index in the list."""
    step = [statistics.median(map(sum, column)) for column in zip(*spent, strict=True)]
    data = [[phases[_DATA] for phases in parts] for parts in spent]
    usual = [statistics.median(column) for column in zip(*data, strict=True)]
    own = [[max(1e-9, sum(phases) - phases[_EXCHANGE]) for phases in parts] for parts in spent]
    # With GPUs the host does not see the wait for others, so own times are equal, but the wait for data is longer.
    late = [
        [max(1e-9, whole + mine - others) for whole, mine, others in zip(step, each, usual, strict=True)]
        for each in data
    ]
    return {**_spans_above(late, step), **_spans_above(own, step)}


def _spans_above(times: Sequence[Sequence[float]], step: Sequence[float]) -> dict[int, tuple[int, int]]:
    """Return the spans in which a rank's times are significantly above those of the others."""
    of_others = [*zip(*(medians_of_others(column) for column in zip(*times, strict=True)), strict=True)]
    logs = [
        [math.log(mine / other) for mine, other in zip(*both, strict=True)]
        for both in zip(times, of_others, strict=True)
    ]
    noises = [_noise(each) for each in logs]
    usual = statistics.median(noises)
    found = {}
    for at, noise in enumerate(noises):
        slow = [
            mine >= _FACTOR * other and mine - other >= _SHARE * whole
            for mine, other, whole in zip(times[at], of_others[at], step, strict=True)
        ]
        first, end = _longest(slow)
        if end - first < _FEWEST_PARTS:
            continue
        error = max(noise, usual, _LEAST_NOISE) / math.sqrt(end - first)
        if statistics.median(logs[at][first:end]) >= max(math.log(_FACTOR), _SURE * error):
            found[at] = (first, end)
    return found


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return the median of all other values, for each value."""
    ordered, others = sorted(range(len(values)), key=values.__getitem__), len(values) - 1
    found = [0.0] * len(values)
    for place, at in enumerate(ordered):
        middle = [values[ordered[one + (one >= place)]] for one in ((others - 1) // 2, others // 2)]
        found[at] = sum(middle) / 2
    return found


def _noise(values: Sequence[float]) -> float:
    """Estimate the standard deviation from differences of neighbours: robust to a lasting change and to outliers."""
    return statistics.median(abs(one - other) for one, other in pairwise(values)) / _MEDIAN_DIFFERENCE


def _longest(slow: Sequence[bool]) -> tuple[int, int]:
    """Return first and end of the span with the most slow parts, less those that other parts in it cancel."""
    best = start = 0
    found, score = (0, 0), 0
    for at, is_slow in enumerate(slow):
        score += 1 if is_slow else -_AGAINST
        if score <= 0:
            score, start = 0, at + 1
        elif score > best:
            best, found = score, (start, at + 1)
    return found


def _straggler(
    ranks: Sequence[RankTimes],
    at: int,
    span: tuple[int, int],
    spent: Sequence[Sequence[Sequence[float]]],
    edges: Sequence[int],
) -> Straggler:
    rank, (first, end) = ranks[at], span
    mine = [statistics.median(phases) for phases in zip(*spent[at][first:end], strict=True)]
    others = [
        statistics.median(phases)
        for phases in zip(*(parts for each in spent if each is not spent[at] for parts in each[first:end]), strict=True)
    ]
    excess = [one - other for one, other in zip(mine, others, strict=True)]
    excess[_EXCHANGE] = 0.0
    worst = max(range(len(PHASES)), key=excess.__getitem__)
    return Straggler(
        ranks=(rank.rank,),
        node=rank.node,
        host=None,
        phase=PHASES[worst],
        first=edges[first],
        steps=edges[end] - edges[first],
        seconds=mine[worst],
        others=others[worst],
        step=sum(mine),
        is_current=end >= (len(edges) - 1) * 3 // 4,
        queued=_queued_more(ranks, at, edges[first], edges[end]),
    )


def _queued(windows: Sequence[Window], low: int, high: int) -> float:
    """Return the part of the time between two steps in which a rank waited for a CPU."""
    within = [one for one in windows if one.first + one.steps > low and one.first < high]
    return sum(one.queued for one in within) / max(1e-9, sum(one.seconds for one in within))


def _queued_more(ranks: Sequence[RankTimes], at: int, low: int, high: int) -> float:
    """Return :func:`_queued` of rank ``at`` if it is much more than of the others, else 0."""
    mine = _queued(ranks[at].windows, low, high)
    if mine < _MUCH_QUEUED:
        return 0.0
    others = statistics.median(_queued(each.windows, low, high) for each in ranks if each is not ranks[at])
    return mine if mine >= others + _MUCH_QUEUED else 0.0


def _by_node(found: Collection[Straggler], ranks: Sequence[RankTimes]) -> list[Straggler]:
    """Merge the stragglers of a node if there are several nodes and all its ranks are slow in the same phase."""
    result = list[Straggler]()
    for node in {one.node for one in found}:
        of_it = [one for one in found if one.node == node]
        everyone = [each.rank for each in ranks if each.node == node]
        phases = {one.phase for one in of_it}
        if 1 < len(everyone) == len(of_it) and len(everyone) < len(ranks) and len(phases) == 1:
            middle = sorted(of_it, key=lambda one: one.seconds)[len(of_it) // 2]
            of_it = [replace(middle, ranks=tuple(everyone))]
        result += of_it
    return result
