"""Stragglers: the right rank for the right reason where there is one, and none where steps only vary."""

from __future__ import annotations

import math
import random
import statistics

from hypothesis import given
from hypothesis import strategies as st

from allranks.record.steptime import PHASES, Window
from allranks.runs.steptime import RankTimes, of_start, per_step
from allranks.runs.stragglers import Straggler, find, medians_of_others

#: How much slower a rank computes, and how much longer it waits for data, in times of the usual step.
Slowness = tuple[float, float]


class Simulation:
    """A training of some minutes, with steps that vary and hiccups, in windows of about two seconds."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.ranks = dice.choice([2, 3, 4, 8])
        self.nodes = dice.choice([1, 2]) if self.ranks >= 4 else 1
        self.usual = 10 ** dice.uniform(-2, 0.3)  # seconds of compute in a step
        self.noise = dice.uniform(0.02, 0.3)
        self.hiccups = dice.choice([0.0, 0.001, 0.005])  # how often a step of a rank takes much longer
        self.data = dice.choice([0.0, 0.02, 0.3])
        self.chips = [dice.lognormvariate(0, 0.02) for _ in range(self.ranks)]

    def run(self, odd: int = -1, slowness: Slowness = (1.0, 0.0), since: float = 0.0) -> list[RankTimes]:
        """Return what the ranks record, of which one is slow once a part of the run is over."""
        windows: list[list[Window]] = [[] for _ in range(self.ranks)]
        now, step, count = 0.0, 0, 64
        for number in range(count):
            steps = max(1, round(self.dice.uniform(1.6, 2.4) / self.usual / 1.5))
            all_spent = [
                self._spent(rank, steps, *(slowness if rank == odd and number >= since * count else (1.0, 0.0)))
                for rank in range(self.ranks)
            ]
            took = max(map(sum, all_spent)) + 0.1 * steps * self.usual
            for rank, spent in enumerate(all_spent):
                spent[PHASES.index("exchange")] = took - sum(spent)
                windows[rank].append(Window(now, step, steps, 0, tuple(spent)))
            now, step = now + took, step + steps
        per_node = self.ranks // self.nodes
        return [RankTimes(rank, rank // per_node, windows[rank]) for rank in range(self.ranks)]

    def _spent(self, rank: int, steps: int, factor: float, delay: float) -> list[float]:
        """Return what some steps of a rank take together, without the wait for others."""
        gauss, exp, root, at = self.dice.gauss, math.exp, math.sqrt(steps), 0.0
        data = steps * (self.data * exp(gauss(0, 0.5 / root)) + delay)
        compute = steps * self.chips[rank] * factor * exp(gauss(0, self.noise / root))
        rest = steps * 0.05
        while self.hiccups and (at := at + self.dice.expovariate(self.hiccups)) < steps:
            rest += self.dice.uniform(2, 30)
        return [self.usual * data, self.usual * compute, 0.0, 0.0, 0.0, self.usual * rest]


def test_no_rank_of_a_quiet_run_is_named() -> None:
    """Takes some seconds: a thousand runs."""
    named = [(seed, one.sentence) for seed in range(1000) for one in find(Simulation(seed).run())]
    assert named == []


def test_a_slow_rank_is_named_with_what_it_takes_its_time_for() -> None:
    missed = []
    for seed in range(200):
        simulation = Simulation(1_000_000 + seed)
        dice = simulation.dice
        odd, phase, factor = dice.randrange(simulation.ranks), dice.choice(["compute", "data"]), dice.uniform(1.3, 2.0)
        slowness = (factor, 0.0) if phase == "compute" else (1.0, factor - 1 + 0.3 * simulation.data)
        found = find(simulation.run(odd, slowness, since=dice.choice([0.0, 0.5])))
        if [(one.ranks, one.phase, one.is_current) for one in found] != [((odd,), phase, True)]:
            missed.append((seed, found))
    assert len(missed) <= 10, missed


def _even(ranks: int, slow: dict[int, tuple[float, float]], windows: int = 40, per_node: int = 2) -> list[RankTimes]:
    """Return ranks that wait 1 s for data, compute 2 s and then wait for the slowest; ``slow`` has other times."""
    found = []
    took = max(sum(each) for each in [(1.0, 2.0), *slow.values()])
    for rank in range(ranks):
        data, compute = slow.get(rank, (1.0, 2.0))
        spent = (data, compute, took - data - compute, 0.0, 0.0, 0.0)
        made = [Window(number * took, 10 + number, 1, 0, spent) for number in range(windows)]
        found.append(RankTimes(rank, rank // per_node, made))
    return found


def test_what_is_said_of_a_rank_and_of_all_ranks_of_a_node() -> None:
    (one,) = find(_even(4, {3: (1.0, 3.0)}))
    assert one == Straggler((3,), 1, None, "compute", 10, 40, 3.0, 2.0, 4.0, is_current=True)
    numbers = "3 s of each step of 4 s, the others 2 s"
    assert one.sentence == f"rank 3 computes 1.5 times slower than the others for 40 steps: {numbers}"
    (node,) = find(_even(6, {2: (3.0, 2.0), 3: (3.5, 2.0)}))
    assert (node.ranks, node.node, node.phase) == ((2, 3), 1, "data")
    numbers = "3.5 s of each step of 5.5 s, the others 1 s"
    assert node.sentence == f"both ranks of node 1 wait for data for 40 steps: {numbers}"


def test_too_few_steps_or_ranks_name_nobody() -> None:
    assert find([]) == []
    assert find(_even(1, {0: (1.0, 9.0)})) == []
    assert find(_even(2, {1: (1.0, 9.0)}, windows=15)) == []
    apart = _even(2, {1: (1.0, 9.0)})
    late = [apart[0], apart[1]._replace(windows=[one._replace(first=one.first + 900) for one in apart[1].windows])]
    assert find(late) == [], "they have no steps in common"


def test_only_steps_since_the_last_start_are_compared() -> None:
    before, after = _even(2, {1: (1.0, 9.0)}), _even(2, {})
    both = [
        one._replace(windows=[*one.windows, *(window._replace(restart=1) for window in other.windows)])
        for one, other in zip(before, after, strict=True)
    ]
    assert find(of_start(both)) == []
    assert [one.ranks for one in find(of_start(both, 0))] == [(1,)]


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=20))
def test_median_of_the_others(values: list[float]) -> None:
    expected = [statistics.median(values[:at] + values[at + 1 :]) for at in range(len(values))]
    assert medians_of_others(values) == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 9))
def test_no_time_is_lost_between_the_parts(counts: list[int], parts: int) -> None:
    windows, step = [], 0
    for count in counts:
        windows.append(Window(float(step), step, count, 0, (0.5 * count,) * len(PHASES)))
        step += count
    edges = sorted({step * part // parts for part in range(parts + 1)})
    for phases in per_step(windows, edges):
        assert all(math.isclose(seconds, 0.5) for seconds in phases)
