"""Stragglers: the right rank for the right reason where there is one, and none where steps only vary."""

from __future__ import annotations

import math
import random

from allranks.record.steptime import PHASES, Window
from allranks.runs.steptime import RankTimes
from allranks.runs.stragglers import find

#: How much slower a rank computes, and how much longer it waits for data, in times of the usual step.
Slowness = tuple[float, float]


class Simulation:
    """A training of some minutes, with steps that vary and hiccups, in windows of about two seconds."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.ranks = dice.choice([2, 3, 4, 8, 16])
        self.nodes = dice.choice([1, 2]) if self.ranks >= 4 else 1
        self.usual = 10 ** dice.uniform(-2, 0.3)  # seconds of compute in a step
        self.noise = dice.uniform(0.02, 0.3)
        self.hiccups = dice.choice([0.0, 0.002, 0.01])  # how often a step of a rank takes much longer
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

        def drawn(mean: float, noise: float) -> float:
            return steps * mean * self.dice.lognormvariate(0, noise / math.sqrt(steps))

        rest = drawn(0.05, 0.3)
        for _ in range(steps):
            if self.dice.random() < self.hiccups:
                rest += self.dice.uniform(2, 30)
        parts = {
            "data": drawn(self.data, 0.5) + steps * delay,
            "compute": drawn(self.chips[rank] * factor, self.noise),
            "other": rest,
        }
        return [self.usual * parts.get(phase, 0.0) for phase in PHASES]


def test_no_rank_of_a_quiet_run_is_named() -> None:
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
