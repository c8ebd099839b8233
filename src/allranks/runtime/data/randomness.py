"""Random numbers of a dataset: the same for a sample wherever it is fetched, and separate from the training's.

Before a sample is fetched, the generators are seeded with a hash of seed, epoch and the sample's index, so its
augmentation does not depend on workers, ranks or resumes. Most datasets draw from one generator or none, and seeding
takes time. So only generators that the dataset was seen to use are seeded: if another one has advanced after a batch,
the batch is fetched again with that one seeded too.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import util
from typing import Any, TypeVar

import torch

from allranks.runtime.seed import hashed

T = TypeVar("T")
#: Seeds the generators in use for the sample with this index.
Seed = Callable[[int], None]


@dataclass(eq=False)
class Generator:
    """One of the process's generators of random numbers.

    Attributes:
        mark: returns quickly what changes with each draw, but for a second normal number that NumPy has put by.
        read: returns the whole state.
        write: sets the whole state.
        seed: starts again from 63 bits.
    """

    mark: Callable[[], object]
    read: Callable[[], Any]
    write: Callable[[Any], object]
    seed: Callable[[int], object]
    marked: object = None
    state: Any = None

    def save(self, *, exact: bool) -> None:
        """Remember mark and state; unless ``exact``, the last state that was read stands for those of equal mark."""
        mark = self.mark()
        if exact or mark != self.marked:
            self.marked, self.state = mark, self.read()


def all_generators() -> list[Generator]:
    """Return Python's generator, torch's on the CPU, and NumPy's if it is installed."""
    default = torch.default_generator
    # torch.manual_seed would go through the generators of all GPUs too.
    found = [
        Generator(_python_mark, random.getstate, random.setstate, random.seed),
        Generator(_torch_mark, default.get_state, default.set_state, default.manual_seed),
    ]
    if util.find_spec("numpy"):
        from numpy import random as numpy

        found.append(
            Generator(
                # Not by get_bit_generator(), which NumPy before 1.24 does not have.
                lambda: _numpy_mark(numpy.mtrand._rand._bit_generator),
                lambda: numpy.get_state(legacy=False),
                numpy.set_state,
                lambda value: numpy.seed(value % 2**32),
            )
        )
    return found


def _python_mark() -> object:
    _, words, gauss = random.getstate()
    # The position in the words of the Mersenne twister moves with each draw, or the words change.
    return words[-1], words[1], gauss


def _torch_mark() -> bytes:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())  # Bytes are compared quicker than tensors.


def _numpy_mark(bits: Any) -> object:
    """Return the memory of the Mersenne twister: 624 words and a position.

    Reading the state through NumPy takes as long as fetching a small batch.
    """
    if type(bits).__name__ != "MT19937":
        return str(bits.state)
    return ctypes.string_at(bits.ctypes.state_address, 625 * 4)


class Seeding:
    """Seeds the generators for each sample, and restores the training's states afterwards."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._all: list[Generator] | None = None
        self._used: list[Generator] = []

    def run(self, epoch: int, read: Callable[[Seed], T]) -> T:
        """Call ``read`` with a function that it must call with a sample's index before reading that sample."""
        if self._all is None:  # made where they are used, which may be a worker
            self._all = all_generators()
        generators = self._all
        for generator in generators:
            generator.save(exact=generator in self._used)
        try:
            while True:
                result = read(self._seeder(epoch))
                moved = [one for one in generators if one not in self._used and one.mark() != one.marked]
                if not moved:
                    return result
                self._used += moved
        finally:
            for generator in self._used:
                generator.write(generator.state)

    def _seeder(self, epoch: int) -> Seed:
        used, prefix = self._used, f"allranks/sample/{self._seed}/{epoch}/"
        if not used:
            return lambda _: None

        def seed(number: int) -> None:
            value = hashed(f"{prefix}{number}")
            for generator in used:
                generator.seed(value)

        return seed


def apart(make: Callable[[], Iterator[T]], name: str) -> Iterator[T]:
    """Iterate with separate random states: the training's generators do not advance.

    ``make`` makes the iterator, with the generators seeded with a hash of the name.
    """
    generators = all_generators()
    training = [generator.read() for generator in generators]
    for generator in generators:
        generator.seed(hashed(name))
    iterator = make()
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            own = _swap(generators, training)
        yield item
        training = _swap(generators, own)


def _swap(generators: list[Generator], states: list[Any]) -> list[Any]:
    """Set the states of generators; return the previous ones."""
    before = [generator.read() for generator in generators]
    for generator, state in zip(generators, states, strict=True):
        generator.write(state)
    return before
