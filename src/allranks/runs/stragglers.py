"""Ranks for which the others wait, step by step: which ones, since when, and for what they take their time.

All ranks make their steps together, so that each takes as long as the slowest. What differs is a rank's own time, which
is that of its steps without the wait for others. A rank is named if its own time, or its wait for data, is well above
the median of the others, over many steps, and by far more than it varies by itself. GPUs that are slow are named by
their clocks.
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

#: Steps are looked at in so many parts of the time at most, of which so many must be slow in a row.
_MOST_PARTS, _FEWEST_PARTS = 48, 11
_FEWEST_STEPS = 10
#: A rank is slow if its own time is so many times that of the others, and the difference such a part of the step.
_FACTOR, _SHARE = 1.15, 0.05
#: A part of the time in which a rank is not slow counts against so many in which it is.
_AGAINST = 2
#: By how many standard errors a rank must differ. It is the largest of many ranks, over any of many spans of time.
_SURE = 6.0
#: Own times are taken to vary by this from one part to the next, even if they did not. And what makes it, for a normal
#: distribution, of the median difference between neighbours: 2 ** 0.5 times its third quartile.
_LEAST_NOISE, _MEDIAN_DIFFERENCE = 0.02, 0.9539
#: Part of the time that a rank waits for a CPU, beyond that of the others, from which on that is reported.
_MUCH_QUEUED = 0.1
#: The link of a node is slow if packets wait to be sent there for so many times the part of the time that they do on
#: the others, if the exchange takes such a part of the step, and by samples that are no older than so many seconds.
_QUEUE_FACTOR, _MUCH_EXCHANGE, _OLD = 1.5, 0.2, 30.0
_DATA, _EXCHANGE = PHASES.index("data"), PHASES.index("exchange")


@dataclass(frozen=True)
class Straggler:
    """Ranks of one node for which the others wait.

    Attributes:
        ranks: one, or all of a node.
        node: the number of their node.
        host: its name, if it is known.
        phase: one of ``PHASES``, for which they take more time than the others; ``exchange``: their link is slow.
        first, steps: how many steps came before, and for how many it lasts.
        seconds: of the phase in each step.
        others: the median of the same of the other ranks; of a slow link, of ``queued`` of the other nodes.
        step: seconds of a step.
        is_current: whether it lasts until the newest step.
        queued: for what part of the time its main thread could run and got no CPU, if that is much more than of others;
            of a slow link, for what part packets waited to be sent.
        clocks: of its GPU, and of the others, if that is slow; else empty.
        workers: what its data-loader workers do, if it waits for data and that is known.
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
        """What a person is told: which ranks, what they do, and the numbers that say so."""
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


def current(attempt: Path) -> list[str]:
    """Return sentences on the stragglers in the last two minutes of an attempt, the worst first, and on slow GPUs."""
    return inspect(attempt)[0]


def inspect(attempt: Path) -> tuple[list[str], dict[int, list[float]]]:
    """Return what :func:`current` does, and by node the seconds of its ranks' newest steps without waits for others."""
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
    """Return stragglers of an attempt with what its nodes' samples tell of them: hosts, GPUs, workers and links.

    The sentences are on the slow GPUs of nodes whose stragglers name none.
    """
    samples = {one["node"]: one for one in node_usage(attempt)}
    slow = {one.node: one for one in slow_gpus(samples.values())}
    local = {node: local_ranks(attempt, node) for node in slow}
    stragglers = list[Straggler]()
    links = _slow_links(ranks, samples)
    # What is found of their ranks besides is named if it takes longer.
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
    """Return the ranks of the node whose link the exchange waits for: its packets queue, and those of others do not.

    All ranks exchange gradients for as long as the slowest, so that their own times do not tell. A node that sends more
    than the others, as one that writes the checkpoints, is none.
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
    """Return how many steps the newest windows have, and the seconds of a step in each phase."""
    last = windows[-2 * _FEWEST_PARTS :]
    steps = sum(one.steps for one in last)
    return steps, [sum(seconds) / steps for seconds in zip(*(one.spent for one in last), strict=True)]


def _edges(ranks: Sequence[Sequence[Window]]) -> list[int]:
    """Return the steps between which times are compared, in which each rank has a window; [] if it is too early."""
    low = max((windows[0].first for windows in ranks), default=0)
    high = min((windows[-1].first + windows[-1].steps for windows in ranks), default=0)
    # Of equal numbers of steps, and about two windows or more: one step that took long must not count for several.
    within = [sum(low <= one.first and one.first + one.steps <= high for one in windows) for windows in ranks]
    parts = min([_MOST_PARTS, *(count // 2 for count in within)])
    if parts < _FEWEST_PARTS or high - low < _FEWEST_STEPS:
        return []
    return [low + (high - low) * part // parts for part in range(parts + 1)]


def _slow_spans(spent: Sequence[Sequence[Sequence[float]]]) -> dict[int, tuple[int, int]]:
    """Return the parts of the time in which a rank is slow, first and end, by its place in the list."""
    step = [statistics.median(map(sum, column)) for column in zip(*spent, strict=True)]
    data = [[phases[_DATA] for phases in parts] for parts in spent]
    usual = [statistics.median(column) for column in zip(*data, strict=True)]
    own = [[max(1e-9, sum(phases) - phases[_EXCHANGE]) for phases in parts] for parts in spent]
    # With GPUs the wait for others is not seen, so that own times are alike. What is longer is the wait for data.
    late = [
        [max(1e-9, whole + mine - others) for whole, mine, others in zip(step, each, usual, strict=True)]
        for each in data
    ]
    return {**_spans_above(late, step), **_spans_above(own, step)}


def _spans_above(times: Sequence[Sequence[float]], step: Sequence[float]) -> dict[int, tuple[int, int]]:
    """Return where the times of a rank are above those of the others by so much that it is not by chance."""
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
    """Return for each value the median of all others."""
    ordered, others = sorted(range(len(values)), key=values.__getitem__), len(values) - 1
    found = [0.0] * len(values)
    for place, at in enumerate(ordered):
        middle = [values[ordered[one + (one >= place)]] for one in ((others - 1) // 2, others // 2)]
        found[at] = sum(middle) / 2
    return found


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation, by differences of neighbours: a lasting change does not count, nor an outlier."""
    return statistics.median(abs(one - other) for one, other in pairwise(values)) / _MEDIAN_DIFFERENCE


def _longest(slow: Sequence[bool]) -> tuple[int, int]:
    """Return first and end of the span that holds most slow parts, where one that is not counts against some."""
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
    """Return for what part of the time between two steps a rank has waited for a CPU."""
    within = [one for one in windows if one.first + one.steps > low and one.first < high]
    return sum(one.queued for one in within) / max(1e-9, sum(one.seconds for one in within))


def _queued_more(ranks: Sequence[RankTimes], at: int, low: int, high: int) -> float:
    """Return for what part of that time a rank has waited for a CPU, if it is much more than of others; else 0."""
    mine = _queued(ranks[at].windows, low, high)
    if mine < _MUCH_QUEUED:
        return 0.0
    others = statistics.median(_queued(each.windows, low, high) for each in ranks if each is not ranks[at])
    return mine if mine >= others + _MUCH_QUEUED else 0.0


def _by_node(found: Collection[Straggler], ranks: Sequence[RankTimes]) -> list[Straggler]:
    """Make one of all ranks of a node, if there are several nodes and all of its ranks are slow for the same."""
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
