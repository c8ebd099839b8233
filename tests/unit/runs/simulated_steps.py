"""Trainings that are simulated: what their ranks would record of their steps, with noise and hiccups."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator

from allranks.record.steptime import PHASES, Window
from allranks.runs.steptime import RankTimes
from allranks.runs.stragglers import Straggler, find

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


def named_in_quiet(seeds: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yield what is said of quiet runs: nothing."""
    for seed in seeds:
        yield from ((seed, one.sentence) for one in find(Simulation(seed).run()))


def missed(seeds: Iterable[int]) -> Iterator[tuple[int, list[Straggler]]]:
    """Yield the runs with a slow rank of which not this one is named, for what it takes its time for."""
    for seed in seeds:
        simulation = Simulation(1_000_000 + seed)
        dice = simulation.dice
        odd, phase, factor = dice.randrange(simulation.ranks), dice.choice(["compute", "data"]), dice.uniform(1.3, 2.0)
        slowness = (factor, 0.0) if phase == "compute" else (1.0, factor - 1 + 0.3 * simulation.data)
        found = find(simulation.run(odd, slowness, since=dice.choice([0.0, 0.5])))
        if [(one.ranks, one.phase, one.is_current) for one in found] != [((odd,), phase, True)]:
            yield seed, found
