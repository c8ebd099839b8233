"""Random numbers of a dataset: the same for a sample wherever it is fetched, and none of the training's.

Before a sample is fetched, the generators are seeded with a hash of seed, epoch and the sample's number; so its
augmentation does not depend on workers, ranks or resumes. Most datasets draw from one generator or from none,
and seeding takes time, so only those are seeded that the dataset was seen to draw from: a batch after which
another one has moved is fetched again, with that one seeded too.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable, Iterator
from importlib import util
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
#: Seeds what needs it, for the sample of this number.
Seed = Callable[[int], None]


class Generator(Protocol):
    """One of the process's generators of random numbers."""

    def save(self) -> None:
        """Remember the state."""

    def moved(self) -> bool:
        """Tell whether somebody has drawn since :meth:`save`."""

    def restore(self) -> None:
        """Put back the state that was remembered."""

    def seed(self, value: int) -> None:
        """Start anew from 63 bits."""


class PythonGenerator:
    """The generator of the module ``random``."""

    def save(self) -> None:  # noqa: D102 - said in Generator
        self._state = random.getstate()

    def moved(self) -> bool:  # noqa: D102
        now, before = random.getstate(), self._state
        # The position in the 624 words of the Mersenne twister moves with each draw, or the words change.
        return (now[1][-1], now[1][0], now[2]) != (before[1][-1], before[1][0], before[2])

    def restore(self) -> None:  # noqa: D102
        random.setstate(self._state)

    def seed(self, value: int) -> None:  # noqa: D102
        random.seed(value)


class TorchGenerator:
    """Torch's default generator on the CPU."""

    def save(self) -> None:  # noqa: D102
        self._state = torch.default_generator.get_state()

    def moved(self) -> bool:  # noqa: D102
        return _bytes(torch.default_generator.get_state()) != _bytes(self._state)

    def restore(self) -> None:  # noqa: D102
        torch.default_generator.set_state(self._state)

    def seed(self, value: int) -> None:  # noqa: D102
        # torch.manual_seed would go through the generators of all GPUs too.
        torch.default_generator.manual_seed(value)


def _bytes(state: torch.Tensor) -> bytes:
    """Give a small tensor's bytes; comparing them is quicker than an operation of torch's."""
    return ctypes.string_at(state.data_ptr(), state.numel())


class NumpyGenerator:
    """NumPy's global generator, ``numpy.random.rand`` and the like.

    Reading its state through NumPy takes as long as fetching a small batch. So a look at the memory of the
    Mersenne twister (``BitGenerator.ctypes``) says whether that is needed. A second normal number that NumPy has
    put by is not seen there, so once somebody has drawn the whole state is read.

    Args:
        exact: read the whole state from the beginning.
    """

    def __init__(self, *, exact: bool = False) -> None:
        import numpy

        self._random = numpy.random
        self._state: Any = None
        self._seen: bytes | None = None
        self._exact = exact

    def save(self) -> None:  # noqa: D102
        seen = self._look()
        if self._exact or seen is None or seen != self._seen:
            self._state = self._random.get_state()
            self._seen = seen

    def moved(self) -> bool:  # noqa: D102
        if self._seen is not None:
            return self._look() != self._seen
        _, key, position, *_ = self._random.get_state()
        return bool(position != self._state[2] or (key != self._state[1]).any())

    def restore(self) -> None:  # noqa: D102
        self._random.set_state(self._state)

    def seed(self, value: int) -> None:  # noqa: D102
        self._exact = True
        self._random.seed(value % 2**32)

    def _look(self) -> bytes | None:
        """Give the memory of the generator, 624 words and a position; None where it cannot be seen."""
        get = getattr(self._random, "get_bit_generator", None)  # from NumPy 1.24 on
        bits: Any = get() if get is not None else None
        if type(bits).__name__ != "MT19937":
            return None
        return ctypes.string_at(bits.ctypes.state_address, 625 * 4)


class Seeding:
    """Seeds the generators for each sample, and leaves them afterwards as the training had them.

    Args:
        seed: of the loader.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._all: list[Generator] | None = None
        self._used: list[Generator] = []

    def run(self, epoch: int, read: Callable[[Seed], T]) -> T:
        """Return what ``read`` returns, which calls what it is given with a number before it uses that sample."""
        if self._all is None:  # made where they are used, which may be a worker
            self._all = all_generators()
        generators = self._all
        for generator in generators:
            generator.save()
        try:
            while True:
                result = read(self._seeder(epoch))
                moved = [one for one in generators if one not in self._used and one.moved()]
                if not moved:
                    return result
                self._used += moved
        finally:
            for generator in self._used:
                generator.restore()

    def _seeder(self, epoch: int) -> Seed:
        used, prefix = self._used, f"allranks/sample/{self._seed}/{epoch}/"
        if not used:
            return _nothing

        def seed(number: int) -> None:
            value = _hashed(f"{prefix}{number}")
            for generator in used:
                generator.seed(value)

        return seed


def _nothing(number: int) -> None:
    """Seed nothing: the dataset was not seen to draw random numbers."""


class Apart(Generic[T]):
    """An iterator whose random numbers are its own: it leaves the training's generators as they were.

    Args:
        make: makes the iterator, with the generators seeded.
        name: what the seed is made of.
    """

    def __init__(self, make: Callable[[], Iterator[T]], name: str) -> None:
        self._training = all_generators(exact=True)
        self._own = all_generators(exact=True)
        for theirs in self._training:
            theirs.save()
        try:
            seed_everything(name)
            self._iterator = make()
        finally:
            self._leave()

    def __iter__(self) -> Apart[T]:
        return self

    def __next__(self) -> T:
        for theirs, ours in zip(self._training, self._own, strict=True):
            theirs.save()
            ours.restore()
        try:
            return next(self._iterator)
        finally:
            self._leave()

    def _leave(self) -> None:
        for theirs, ours in zip(self._training, self._own, strict=True):
            ours.save()
            theirs.restore()


def seed_everything(name: str) -> None:
    """Seed all generators with a hash of a name."""
    value = _hashed(name)
    for generator in all_generators():
        generator.seed(value)


def all_generators(*, exact: bool = False) -> list[Generator]:
    """Give the generators there are: Python's, torch's on the CPU, and NumPy's where it is installed."""
    always: list[Generator] = [PythonGenerator(), TorchGenerator()]
    return [*always, NumpyGenerator(exact=exact)] if util.find_spec("numpy") else always


def _hashed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
