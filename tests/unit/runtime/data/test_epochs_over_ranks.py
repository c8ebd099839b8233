"""The promise: in each epoch every sample once over all ranks, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allranks import Context, RankError
from allranks.runtime.data.loader import Loader
from allranks.runtime.data.mapped import Order

EPOCHS = 3
shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def steps_of(loaders: list[Loader], steps: int | None, epochs: int = EPOCHS) -> list[tuple[int, list[int]]]:
    """Give epoch and counting samples over all ranks of each step, at most ``steps``; all ranks make as many."""
    per_rank = []
    for loader in loaders:
        seen = []
        for epoch in loader.epochs(epochs):
            for batch in loader if steps is None else islice(loader, steps - len(seen)):
                assert len(batch) >= 1
                seen.append((epoch, batch[: loader._progress.samples], loader._progress.total))
            if len(seen) == steps:
                break
        per_rank.append(seen)
    assert len({len(seen) for seen in per_rank}) == 1
    merged = []
    for ranks in zip(*per_rank, strict=True):
        (epoch,) = {epoch for epoch, _, _ in ranks}
        samples = [sample for _, part, _ in ranks for sample in part]
        assert {total for _, _, total in ranks} == {len(samples)}
        merged.append((epoch, samples))
    return merged


@shared
@given(st.data())
def test_each_sample_once_in_each_epoch_over_any_stops_and_world_sizes(
    make_rank: Callable[..., Loader], data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4), label="world sizes")
    length = data.draw(st.integers(5, 90), label="samples")
    seed = data.draw(st.integers(0, 2**40), label="seed")
    shuffle = data.draw(st.booleans())
    state: dict[str, Any] | None = None
    seen: list[tuple[int, list[int]]] = []
    for number, world_size in enumerate(sizes):
        total = world_size * data.draw(st.integers(1, 8), label="batch of a rank")
        loaders = [make_rank(length, total, rank, world_size, seed=seed, shuffle=shuffle) for rank in range(world_size)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        stop = None if number == len(sizes) - 1 else data.draw(st.integers(1, 12), label="steps until the stop")
        seen += steps_of(loaders, stop)
        states = [loader.state_dict() for loader in loaders]
        assert all(one == states[0] for one in states)
        state = states[0]
    for epoch in range(EPOCHS):
        samples = [sample for its_epoch, batch in seen if its_epoch == epoch for sample in batch]
        # Not only once each: in the very order that one rank alone would have had.
        assert samples == Order(length, seed, shuffle=shuffle).take(epoch, 0, length).tolist()


@shared
@given(st.integers(12, 100), st.integers(1, 4), st.integers(0, 99), st.integers(0, 20))
def test_global_batches_are_the_same_for_every_world_size(
    make_rank: Callable[..., Loader], length: int, times: int, seed: int, stop: int
) -> None:
    total = 12 * times
    whole = steps_of([make_rank(length, total, 0, 1, seed=seed)], None)
    for world_size in (2, 3, 4, 6, 12):
        ranks = [make_rank(length, total, rank, world_size, seed=seed) for rank in range(world_size)]
        begun = steps_of(ranks, stop) if stop else []
        for rank in ranks:
            rank.load_state_dict(rank.state_dict())
        assert begun + steps_of(ranks, None) == whole


def test_a_rank_without_samples_gets_a_filler_of_the_same_batch(make_rank: Callable[..., Loader]) -> None:
    loaders = [make_rank(7, 6, rank, 3, shuffle=False) for rank in range(3)]
    got = [[(batch, loader._progress.samples, loader._progress.total) for batch in loader] for loader in loaders]
    assert got == [
        [([0, 1], 2, 6), ([6], 1, 1)],
        [([2, 3], 2, 6), ([6], 0, 1)],
        [([4, 5], 2, 6), ([6], 0, 1)],
    ]


def test_progress_speaks_of_the_batch_at_hand_and_of_none_afterwards(make_rank: Callable[..., Loader]) -> None:
    loader = make_rank(10, 4, 1, 2)
    progress, seen = loader._progress, []
    for _ in loader:
        seen.append((progress.samples, progress.total, progress.full, progress.last, progress.left))
    assert seen == [(2, 4, 4, 2, 2), (2, 4, 4, 2, 1), (1, 2, 4, 2, 0)]
    assert (progress.samples, progress.total, progress.full, progress.last, progress.left) == (None,) * 5


def test_a_training_that_is_resumed_at_its_end_says_so(ctx: Context, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = (ctx.loader([1.0, 2.0, 3.0], batch_size=3) for _ in range(2))
    for _ in first.epochs(2):
        list(first)
    again.load_state_dict(first.state_dict())
    capsys.readouterr()
    assert list(again.epochs(2)) == []
    said = "all 2 epochs are done: raise their number to train on, or start without the checkpoint\n"
    assert capsys.readouterr().out == said


def test_a_stop_after_the_last_batch_leaves_what_follows_the_loop_to_be_done(make_rank: Callable[..., Loader]) -> None:
    loader = make_rank(6, 3, 0, 1)
    for _ in loader.epochs(2):
        for _ in loader:
            if loader._progress.left == 0:
                state = loader.state_dict()
        break
    again = make_rank(6, 3, 0, 1)
    again.load_state_dict(state)
    assert [(epoch, len(list(again))) for epoch in again.epochs(3)] == [(0, 0), (1, 2), (2, 2)]
    done = make_rank(6, 3, 0, 1)
    done.load_state_dict(again.state_dict())
    assert list(done.epochs(3)) == []
    assert list(done.epochs(4)) == [3]


def test_a_loop_that_was_left_is_continued_by_the_next(make_rank: Callable[..., Loader]) -> None:
    loader = make_rank(9, 2, 0, 1, shuffle=False)
    epochs = []
    for _ in loader.epochs(2):
        seen = []
        for batch in loader:
            seen.append(batch)
            break
        epochs.append(seen + list(loader))
    assert epochs == [[[0, 1], [2, 3], [4, 5], [6, 7], [8]]] * 2


def test_what_is_left_of_an_epoch_does_not_follow_in_the_next(make_rank: Callable[..., Loader]) -> None:
    loader = make_rank(9, 2, 0, 1, shuffle=False)
    assert [next(iter(loader)) for _ in loader.epochs(3)] == [[0, 1]] * 3


def test_without_epochs_each_full_pass_is_one(make_rank: Callable[..., Loader]) -> None:
    loader = make_rank(5, 2, 0, 1, seed=4)
    order = Order(5, seed=4)
    for epoch in range(3):
        assert loader.epoch == epoch
        assert [sample for batch in loader for sample in batch] == order.take(epoch, 0, 5).tolist()


def test_a_look_at_the_data_before_the_training_does_not_count(make_rank: Callable[..., Loader]) -> None:
    loader, other = make_rank(9, 2, 0, 1), make_rank(9, 2, 0, 1)
    next(iter(loader))
    assert [list(loader) for _ in loader.epochs(2)] == [list(other) for _ in other.epochs(2)]


def test_a_second_pass_in_an_epoch_is_an_error(make_rank: Callable[..., Loader]) -> None:
    loader = make_rank(9, 2, 0, 1)
    for _ in loader.epochs(1):
        list(loader)
        with pytest.raises(RankError, match="a second pass over the loader in epoch 0"):
            list(loader)


def test_two_loops_at_a_time_are_an_error(make_rank: Callable[..., Loader]) -> None:
    loader = make_rank(9, 2, 0, 1)
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    with pytest.raises(RankError, match="cannot continue"):
        next(first)


def test_going_back_to_a_state_within_an_epoch(make_rank: Callable[..., Loader]) -> None:
    loader = make_rank(6, 2, 0, 1, shuffle=False)
    state, seen = None, []
    for epoch in loader.epochs(2):
        for batch in loader:
            seen.append((epoch, batch[0]))
            if len(seen) == 2:
                state = loader.state_dict()
            if len(seen) == 5:
                assert state is not None
                loader.load_state_dict(state)
                break
    assert seen == [(0, 0), (0, 2), (0, 4), (1, 0), (1, 2), (0, 4), (1, 0), (1, 2), (1, 4)]


def test_loops_end_when_the_job_was_asked_to_stop(make_rank: Callable[..., Loader]) -> None:
    loader = make_rank(9, 2, 0, 1)
    seen = 0
    for _ in loader.epochs(5):
        for _ in loader:
            seen += 1
            loader._progress.stopping = seen == 7
    assert (seen, loader.epoch, loader.state_dict()["position"]) == (7, 1, 4)
    assert list(loader.epochs(5)) == []
    assert list(loader) == []


def test_a_changed_batch_is_said(make_rank: Callable[..., Loader]) -> None:
    loader, said = make_rank(40, 8, 0, 1), []
    loader._say = said.append
    loader.load_state_dict(make_rank(40, 4, 0, 1).state_dict())
    assert said == ["batch: 8 samples a step from here on, 4 until the checkpoint"]


@pytest.mark.parametrize(
    ("other", "difference", "fix"),
    [
        ({"length": 41}, "of 41 samples and not 40", "it gets the same dataset"),
        ({"seed": 7}, "of seed 7 and not 0", "seed=7"),
        ({"shuffle": False}, "of shuffle=False and not shuffle=True", "shuffle=False"),
        ({"kind": "stream"}, "of a dataset of kind stream and not map", "the same kind of dataset"),
    ],
)
def test_a_state_of_something_else_is_refused(
    make_rank: Callable[..., Loader], other: dict[str, Any], difference: str, fix: str
) -> None:
    loader = make_rank(40, 8, 0, 1)
    with pytest.raises(RankError) as caught:
        loader.load_state_dict({**loader.state_dict(), **other})
    assert difference in caught.value.what
    assert fix in str(caught.value.fix)
    assert loader.state_dict()["position"] == 0


def test_a_state_of_no_loader_is_refused(make_rank: Callable[..., Loader]) -> None:
    with pytest.raises(RankError, match="holds no state of a loader"):
        make_rank(40, 8, 0, 1).load_state_dict({"step": 3})


@pytest.mark.parametrize("count", [-1, 2.5, True, "3"])
def test_epochs_are_a_number(make_rank: Callable[..., Loader], count: Any) -> None:
    with pytest.raises(RankError, match="invalid number of epochs"):
        make_rank(40, 8, 0, 1).epochs(count)


def test_a_state_from_after_the_loop_begins_with_the_next_epoch(make_rank: Callable[..., Loader]) -> None:
    loader = make_rank(6, 2, 0, 1)
    states = []
    for _ in loader.epochs(1):
        for _ in loader:
            states.append(loader.state_dict())
        states.append(loader.state_dict())
    in_last_step, after = make_rank(6, 2, 0, 1), make_rank(6, 2, 0, 1)
    in_last_step.load_state_dict(states[-2])
    after.load_state_dict(states[-1])
    assert [(epoch, len(list(in_last_step))) for epoch in in_last_step.epochs(2)] == [(0, 0), (1, 3)]
    assert [(epoch, len(list(after))) for epoch in after.epochs(2)] == [(1, 3)]
