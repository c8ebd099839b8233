from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from allranks import Context
from allranks.runtime.data.fetch import ItemFetch, ListFetch, TensorFetch, choose, move
from allranks.runtime.data.randomness import Seeding

TENSORS = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))


class Items(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> int:
        return number


class Lists(Items):
    def __getitems__(self, numbers: list[int]) -> list[int]:
        return [number * 10 for number in numbers]


class Batches(Items):
    def __getitems__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        return {"numbers": torch.tensor(numbers)}


class OwnItems(Lists):
    def __getitem__(self, number: int) -> int:
        return -number


class OwnTensors(TensorDataset):
    def __getitem__(self, number: int) -> Any:
        return self.tensors[1][number] + 100


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        (TENSORS, TensorFetch),
        (Subset(Subset(TENSORS, range(9)), [1, 2]), TensorFetch),
        (Subset(TENSORS, [-1, 2]), ItemFetch),
        (OwnTensors(torch.arange(3), torch.arange(3)), ItemFetch),
        (Lists(), ListFetch),
        (Subset(Lists(), [3, 4]), ListFetch),
        (OwnItems(), ItemFetch),
        (Items(), ItemFetch),
        (Subset(Items(), [3, 4]), ItemFetch),
        (StackDataset(Items(), Items()), ItemFetch),
        (ConcatDataset([Items(), Items()]), ItemFetch),
        ([1, 2, 3], ItemFetch),
    ],
)
def test_the_fastest_way_that_gives_the_same_samples(dataset: Any, kind: type) -> None:
    assert type(choose(dataset, Seeding(0), None)) is kind
    assert type(choose(dataset, Seeding(0), None, "item")) is ItemFetch


@pytest.mark.parametrize("dataset", [TENSORS, Subset(Subset(TENSORS, [9, 8, 7, 6, 5]), [4, 0, 2])])
def test_rows_of_tensors_are_what_the_dataset_gives(dataset: Any) -> None:
    numbers = torch.tensor([2, 0, 1])
    rows = choose(dataset, Seeding(0), None)(0, numbers)
    one_by_one = choose(dataset, Seeding(0), None, "item")(0, numbers)
    assert isinstance(rows, list)
    assert all(torch.equal(left, right) for left, right in zip(rows, one_by_one, strict=True))


def test_batches_are_new_tensors_each_time() -> None:
    fetch = choose(TENSORS, Seeding(0), None)
    first = fetch(0, torch.tensor([0, 1]))
    first[0].zero_()
    assert fetch(0, torch.tensor([0, 1]))[0].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert TENSORS.tensors[0][0].tolist() == [0.0, 1.0]


def test_lists_of_samples_are_collated_and_batches_are_not() -> None:
    assert choose(Lists(), Seeding(0), None)(0, torch.tensor([2, 1])).tolist() == [20, 10]
    assert choose(Lists(), Seeding(0), tuple)(0, torch.tensor([2, 1])) == (20, 10)
    assert choose(Batches(), Seeding(0), None)(0, torch.tensor([2, 1]))["numbers"].tolist() == [2, 1]
    assert choose(Subset(Batches(), [5, 6]), Seeding(0), None)(0, torch.tensor([1, 0]))["numbers"].tolist() == [6, 5]


class Drawing(Items):
    """Draws from some of the generators, and counts its calls."""

    def __init__(self, *sources: str) -> None:
        self.sources = sources
        self.calls = 0

    def __getitem__(self, number: int) -> Any:
        self.calls += 1
        draws = {
            "python": lambda: random.gauss(0, 1),
            "numpy": lambda: float(np.random.randn()),
            "torch": lambda: torch.randn(()).item(),
        }
        return [number, *(draws[source]() for source in self.sources)]


ALL = ("python", "numpy", "torch")


@pytest.mark.parametrize("sources", [(), ("python",), ("numpy",), ("torch",), ALL])
def test_a_sample_is_the_same_in_whichever_batch_it_is(sources: tuple[str, ...]) -> None:
    def samples(*batches: list[int], epoch: int = 3, seed: int = 5) -> dict[int, Any]:
        fetch = choose(Drawing(*sources), Seeding(seed), list)
        return {one[0]: one[1:] for batch in batches for one in fetch(epoch, torch.tensor(batch))}

    whole = samples(list(range(10)))
    assert samples([9, 0, 3], [1, 2], [8, 7, 6], [5], [4]) == whole
    if sources:
        assert len({tuple(drawn) for drawn in whole.values()}) == 10
        assert samples(list(range(10)), epoch=4)[0] != whole[0]
        assert samples(list(range(10)), seed=6)[0] != whole[0]


@pytest.mark.parametrize("sources", [(), ("python",), ("numpy",), ("torch",), ALL])
def test_the_trainings_random_numbers_are_not_touched(sources: tuple[str, ...]) -> None:
    def train(fetch: Any) -> list[float]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        drawn = []
        for number in range(4):
            if fetch is not None:
                fetch(0, torch.tensor([number, number + 1]))
            # An odd number of normal numbers: generators make two at a time and put one by.
            drawn += [random.gauss(0, 1), float(np.random.randn()), torch.randn(()).item()]
        return drawn

    assert train(choose(Drawing(*sources), Seeding(0), list)) == train(None)


def test_only_the_first_batch_that_draws_is_fetched_twice() -> None:
    dataset = Drawing("torch")
    fetch = choose(dataset, Seeding(0), list)
    for expected in (4, 6, 8):
        fetch(0, torch.tensor([1, 2]))
        assert dataset.calls == expected


def test_generators_are_put_back_after_an_error() -> None:
    class Broken(Items):
        def __getitem__(self, number: int) -> int:
            torch.rand(3)
            if number == 1:
                raise OSError("file is gone")
            return number

    fetch = choose(Broken(), Seeding(0), list)
    fetch(0, torch.tensor([0]))
    before = torch.get_rng_state()
    with pytest.raises(OSError, match="file is gone"):
        fetch(0, torch.tensor([0, 1]))
    assert torch.equal(before, torch.get_rng_state())


def test_a_generator_that_is_drawn_from_later_is_found_out_then() -> None:
    class Later(Items):
        def __getitem__(self, number: int) -> Any:
            return (number, random.random() if number > 4 else 0.0)

    def samples(*batches: list[int]) -> dict[int, float]:
        fetch = choose(Later(), Seeding(0), list)
        return dict(one for batch in batches for one in fetch(0, torch.tensor(batch)))

    assert samples([0, 1], [2, 3], [4, 5], [6, 7]) == samples([7, 6, 5, 4, 3, 2, 1, 0])


def test_a_collate_function_draws_the_same_for_the_same_batch() -> None:
    def mixed(samples: list[Any]) -> float:
        return float(torch.rand(()))

    one, other = choose(Drawing("torch"), Seeding(0), mixed), choose(Drawing("torch"), Seeding(0), mixed)
    torch.manual_seed(8)
    first = [one(0, torch.tensor(batch)) for batch in ([0, 1], [2, 3])]
    assert [other(0, torch.tensor(batch)) for batch in ([2, 3], [0, 1])] == first[::-1]


def test_everything_with_a_device_in_a_batch_moves() -> None:
    class Custom:
        device = "cpu"

        def to(self, device: torch.device) -> Custom:
            self.device = device.type
            return self

    pair = namedtuple("pair", "x y")
    batch = [torch.zeros(2), (torch.zeros(1), "name"), pair(torch.zeros(1), 3), {"a": torch.zeros(1)}, Custom()]
    moved = move(batch, torch.device("meta"), pinned=False)
    assert moved[0].device.type == "meta"
    assert moved[1][0].device.type == "meta"
    assert moved[1][1] == "name"
    assert (type(moved[2]), moved[2].x.device.type, moved[2].y) == (pair, "meta", 3)
    assert moved[3]["a"].device.type == "meta"
    assert moved[4].device == "meta"


def test_a_batch_stays_as_it_is_on_the_cpu(ctx: Context) -> None:
    finish = ctx.loader(TENSORS, batch_size=2, quiet=True)._source.pool.finish
    batch = [torch.zeros(2)]
    assert finish(batch) is batch


def test_a_batch_of_lists_is_seeded_as_a_whole(ctx: Context) -> None:
    class Random(Items):
        def __getitem__(self, number: int) -> float:
            return torch.rand(()).item()

        def __getitems__(self, numbers: list[int]) -> list[float]:
            return [self[number] for number in numbers]

    def drawn(batch_size: int, **options: Any) -> list[float]:
        loader = ctx.loader(Random(), batch_size=batch_size, shuffle=False, quiet=True, **options)
        return [value for batch in loader for value in batch.tolist()]

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(2)
    assert drawn(5, fetch="item") == drawn(2, fetch="item")
