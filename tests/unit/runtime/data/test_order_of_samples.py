from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks.runtime.data.loader import Loader
from allranks.runtime.data.mapped import Order, Split, epoch_seed, part


def test_a_loop_that_counts_batches_completes_its_epoch(make_rank: Callable[..., Loader]) -> None:
    """As Lightning's Trainer does: it takes len(loader) batches and asks for no other."""
    loader = make_rank(10, 4, 0, 2)
    epochs = [[batch for _, batch in zip(range(len(loader)), loader, strict=False)] for _ in range(2)]
    whole = make_rank(10, 4, 0, 2)
    assert epochs == [[*whole], [*whole]]
    assert (loader.epoch, loader.state_dict()["position"]) == (1, 10)
    resumed = make_rank(10, 4, 0, 2)
    resumed.load_state_dict(loader.state_dict())
    third = [*whole]
    assert [*resumed] == third
    assert third not in epochs


def test_the_order_is_the_one_that_it_was() -> None:
    # Exact: a checkpoint of an earlier version must be continued in the same order.
    assert epoch_seed(0, 0) == 7886262100191640381
    assert Order(10, seed=0).take(0, 0, 10).tolist() == [5, 8, 0, 6, 9, 7, 1, 3, 4, 2]
    assert Order(10, seed=0).take(1, 0, 4).tolist() == [8, 7, 9, 1]


def test_seed_and_epoch_are_not_interchangeable() -> None:
    assert Order(100, seed=1).take(0, 0, 100).tolist() != Order(100, seed=0).take(1, 0, 100).tolist()


def test_the_order_leaves_the_training_its_random_numbers() -> None:
    before = torch.get_rng_state()
    Order(1000, seed=3).take(2, 0, 10)
    assert torch.equal(before, torch.get_rng_state())


def test_without_shuffling_every_epoch_is_as_the_dataset() -> None:
    order = Order(7, seed=5, shuffle=False)
    assert [order.take(epoch, 2, 5).tolist() for epoch in (0, 1)] == [[2, 3, 4], [2, 3, 4]]


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 40))
def test_parts_are_all_of_it_and_differ_by_one_at_most(start: int, size: int, world_size: int) -> None:
    parts = [part(start, start + size, rank, world_size) for rank in range(world_size)]
    assert [position for begin, end in parts for position in range(begin, end)] == list(range(start, start + size))
    sizes = [end - begin for begin, end in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 500), st.integers(1, 60), st.data())
def test_batches_follow_from_any_position(length: int, batch: int, data: st.DataObject) -> None:
    split = Split(length, batch)
    position = data.draw(st.integers(0, length))
    batches = list(split.batches(position))
    assert [one for start, stop in batches for one in range(start, stop)] == list(range(position, length))
    assert split.count_and_last(position)[0] == len(batches)
    assert all(stop - start == batch for start, stop in batches[:-1])
    if batches:
        assert batches[-1][1] - batches[-1][0] == split.count_and_last(position)[1]


@given(st.integers(1, 500), st.integers(1, 60))
def test_dropping_the_last_leaves_full_batches_only(length: int, batch: int) -> None:
    split = Split(length, batch, drop_last=True)
    batches = list(split.batches())
    assert split.count_and_last() == (len(batches), batch)
    assert all(stop - start == batch for start, stop in batches)
    assert len(batches) == length // batch


@given(st.integers(1, 20), st.integers(1, 9), st.data())
def test_an_evaluation_has_a_sample_for_each_rank_in_each_batch(
    world_size: int, batch_size: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(world_size, 20 * world_size * batch_size))
    split = Split(length, batch_size * world_size, even_over=world_size)
    cuts = list(split.batches())
    assert split.count_and_last() == (len(cuts), cuts[-1][1] - cuts[-1][0])
    assert [one for start, stop in cuts for one in range(start, stop)] == list(range(length))
    sizes = [end - begin for cut in cuts for rank in range(world_size) for begin, end in [part(*cut, rank, world_size)]]
    assert min(sizes) >= 1
    assert max(sizes) <= (batch_size if batch_size > 1 else 2)
    # Only the last two batches are of an unusual size.
    assert all(stop - start == batch_size * world_size for start, stop in cuts[:-2])
