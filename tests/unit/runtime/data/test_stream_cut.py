from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks import RankError
from allranks.runtime.data.mapped import Share
from allranks.runtime.data.stream import Kept, cut


def kept_of(length: int, rule: dict[str, Any], skip: int = 0) -> list[Kept]:
    return list(cut(range(length), skip=skip, **rule))


def rules(world_size: int, size: int, *, filler: bool = True, **options: bool) -> list[dict[str, Any]]:
    """Give the arguments of each rank."""
    return [{"size": size, "share": Share(rank, world_size, filler), **options} for rank in range(world_size)]


@given(st.integers(1, 5), st.integers(1, 6), st.booleans(), st.data())
def test_every_sample_once_in_the_same_global_batches(
    world_size: int, batch_size: int, drop: bool, data: st.DataObject
) -> None:
    size = world_size * batch_size
    length = data.draw(st.integers(size if drop else world_size, 8 * size))
    skip = data.draw(st.integers(0, length))
    ranks = [kept_of(length, rule, skip) for rule in rules(world_size, size, drop_last=drop)]
    stop = skip + (length - skip) // size * size if drop else length
    position = skip
    for number, parts in enumerate(zip(*ranks, strict=True)):
        total = min(size, stop - position)
        samples = sorted(sample for kept in parts for sample in kept.samples[: kept.counted])
        assert samples == list(range(position, position + total))
        assert {(kept.total, kept.is_last) for kept in parts} == {(total, number == len(ranks[0]) - 1)}
        counts = [kept.counted for kept in parts]
        assert max(counts) - min(counts) <= 1
        assert all(kept.samples and kept.samples[0] >= position for kept in parts)
        position += total
    assert position == stop


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_an_evaluation_needs_no_fillers(world_size: int, batch_size: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(world_size, 60))
    ranks = [kept_of(length, rule) for rule in rules(world_size, world_size * batch_size, filler=False, even=True)]
    assert len({len(rank) for rank in ranks}) == 1
    seen = sorted(sample for rank in ranks for kept in rank for sample in kept.samples)
    assert seen == list(range(length))
    assert all(1 <= kept.counted == len(kept.samples) <= batch_size + 1 for rank in ranks for kept in rank)


def test_an_evaluation_with_too_few_samples_may_leave_ranks_without() -> None:
    assert [len(kept_of(2, rule)) for rule in rules(3, 3, filler=False)] == [1, 1, 0]


def test_an_empty_stream_is_an_error() -> None:
    with pytest.raises(RankError, match="the dataset is empty"):
        kept_of(0, rules(2, 4)[0])


@pytest.mark.parametrize("rank", [0, 2])
def test_fewer_samples_than_ranks_are_an_error_on_every_rank(rank: int) -> None:
    with pytest.raises(RankError, match=r"2 samples, fewer than there are ranks \(3\)"):
        kept_of(2, rules(3, 6)[rank])


def test_a_stream_that_became_shorter_cannot_be_continued() -> None:
    with pytest.raises(RankError, match="ended after 5 samples, but 8 of this epoch are done"):
        kept_of(5, rules(1, 4)[0], skip=8)


def test_no_full_batch_is_an_error_where_only_those_are_wanted() -> None:
    with pytest.raises(RankError, match="has 3 samples, and a batch takes 4"):
        kept_of(3, rules(1, 4, drop_last=True)[0])
