"""Stragglers: the right rank for the right reason where there is one, and none where steps only vary."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from allranks.record.steptime import PHASES, Window
from allranks.runs.steptime import RankTimes, per_step
from allranks.runs.stragglers import Straggler, _medians_of_others, find

EXCHANGE = PHASES.index("exchange")


class Simulation:
    """Ranks that train together: each waits in each step for the slowest."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.ranks = dice.choice([2, 3, 4, 8, 16])
        self.nodes = dice.choice([1, 2]) if self.ranks >= 4 else 1
        self.usual = 10 ** dice.uniform(-2, 0.5)  # seconds of compute in a step
        self.noise = dice.uniform(0.02, 0.3)
        self.hiccups = dice.choice([0.0, 0.0, 0.002, 0.01])
        self.data = dice.choice([0.0, 0.02, 0.3])
        self.chips = [dice.lognormvariate(0, 0.02) for _ in range(self.ranks)]

    def run(self, seconds: float, slow: Callable[[int, int], tuple[float, float]] | None = None) -> list[RankTimes]:
        """Return the windows of all ranks; ``slow`` gives the factor of compute and the delay of data by rank, step."""
        dice, now, step = self.dice, 0.0, 0
        open_ = [[0.0] * len(PHASES) for _ in range(self.ranks)]
        since, counts = [dice.uniform(-2, 0) for _ in range(self.ranks)], [0] * self.ranks
        windows: list[list[Window]] = [[] for _ in range(self.ranks)]
        while now < seconds:
            own = []
            for rank in range(self.ranks):
                factor, delay = slow(rank, step) if slow else (1.0, 0.0)
                noise = self.noise
                compute = self.usual * self.chips[rank] * factor * dice.lognormvariate(0, noise)
                data = self.usual * self.data * dice.lognormvariate(0, 0.5) + delay * self.usual
                rest = 0.05 * self.usual * dice.lognormvariate(0, 0.3)
                if dice.random() < self.hiccups:
                    rest += self.usual * dice.uniform(2, 30)
                own.append((data, compute, rest))
            took = max(map(sum, own)) + 0.1 * self.usual
            now, step = now + took, step + 1
            for rank, (data, compute, rest) in enumerate(own):
                spent = open_[rank]
                for phase, part in zip((0, 1, 5, EXCHANGE), (data, compute, rest, took - data - compute - rest)):
                    spent[phase] += part
                counts[rank] += 1
                if now - since[rank] >= 2:
                    windows[rank].append(Window(now - sum(spent), step - counts[rank], counts[rank], 0, tuple(spent)))
                    open_[rank], since[rank], counts[rank] = [0.0] * len(PHASES), now, 0
        per_node = self.ranks // self.nodes
        return [RankTimes(rank, rank // per_node, windows[rank]) for rank in range(self.ranks)]
