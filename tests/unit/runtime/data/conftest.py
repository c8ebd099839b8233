"""Loaders without processes, and a context of one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import allranks
from allranks import Context
from allranks.runtime.data.fetch import ItemFetch
from allranks.runtime.data.loader import Loader
from allranks.runtime.data.mapped import BatchSize, MapSource, Order, Share, Split
from allranks.runtime.data.randomness import Seeding
from allranks.runtime.data.workers import Pool
from allranks.runtime.progress import Progress

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL", "MASTER_", "TORCHELASTIC", "SLURM_", "PBS_", "OMPI_", "PMI", "ALLRANKS_")


@pytest.fixture
def ctx(monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    with allranks.init(device="cpu", seed=None) as context:
        yield context


@pytest.fixture
def make_rank() -> Callable[..., Loader]:
    """Give a function that makes the loader that one rank of many would have."""

    def make(
        length: int, total: int, rank: int, world_size: int, *, seed: int = 0, shuffle: bool = True, drop: bool = False
    ) -> Loader:
        split = Split(length, total, drop)
        source = MapSource(
            Order(length, seed, shuffle=shuffle),
            split,
            Share(rank, world_size, filler=True),
            ItemFetch(range(length), Seeding(seed), list),
            Pool(workers=0, prefetch=2, pinned=False, finish=lambda batch: batch),
        )
        identity: dict[str, Any] = {"kind": "map", "length": length, "seed": seed, "shuffle": shuffle}
        size = BatchSize(total // world_size, total)
        return Loader(
            range(length),
            source,
            size,
            Progress(),
            identity,
            world_size=world_size,
            length=split.count_and_last()[0],
            say=lambda text: None,
        )

    return make
