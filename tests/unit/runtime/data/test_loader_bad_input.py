from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from allranks import Context, RankError
from allranks.runtime.data.mapped import BatchSize, batch_sizes


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


TEN = TensorDataset(torch.arange(10))


@pytest.mark.parametrize(
    ("dataset", "options", "parts"),
    [
        (TEN, {}, ["neither batch_size nor global_batch_size", "exactly one"]),
        (TEN, {"batch_size": 2, "global_batch_size": 2}, ["both batch_size and global_batch_size", "exactly one"]),
        (TEN, {"batch_size": 0}, ["invalid number of samples: batch_size=0"]),
        (TEN, {"batch_size": 2.0}, ["invalid number of samples: batch_size=2.0"]),
        (TEN, {"global_batch_size": True}, ["invalid number of samples: global_batch_size=True"]),
        ([], {"batch_size": 2}, ["the dataset is empty", "its length is 0"]),
        (TEN, {"batch_size": 16, "drop_last": True}, ["has 10 samples, and a batch takes 16", "drop_last=False"]),
        (TEN, {"batch_size": 2, "workers": -1}, ["invalid number of processes: workers=-1", '"auto"']),
        (TEN, {"batch_size": 2, "workers": "many"}, ["invalid number of processes: workers='many'"]),
        (TEN, {"batch_size": 2, "prefetch": 0}, ["invalid number of batches: prefetch=0"]),
        (TEN, {"batch_size": 2, "seed": "one"}, ["invalid seed: seed='one'"]),
        (TEN, {"batch_size": 2, "fetch": "all"}, ["fetch='all'", '"item"']),
        (TEN, {"batch_size": 2, "sharded": True}, ["sharded=True with a dataset whose samples have numbers"]),
        (Stream(), {"batch_size": 2, "workers": 2}, ["workers=2 for a stream", "workers=1", "sharded=True"]),
        (iter([1, 2]), {"batch_size": 2}, ["a list_iterator, can be iterated only once", "__iter__()"]),
        (
            DataLoader(TEN, batch_size=5),
            {"batch_size": 2},
            [
                "the loader got a DataLoader, not a dataset",
                "would count as samples",
                "ctx.loader(dataset, batch_size=5)",
            ],
        ),
        (7, {"batch_size": 2}, ["the loader got int, which is not a dataset", "IterableDataset"]),
    ],
)
def test_what_cannot_work_is_said(ctx: Context, dataset: Any, options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(RankError) as caught:
        ctx.loader(dataset, **options)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("dataset", "options", "part"),
    [
        ([], {"batch_size": 2}, "the dataset is empty"),
        (TEN, {"batch_size": 0}, "invalid number of samples: batch_size=0"),
        (TEN, {"batch_size": 2, "workers": -1}, "workers=-1"),
    ],
)
def test_what_cannot_work_in_an_evaluation_is_said(
    ctx: Context, dataset: Any, options: dict[str, Any], part: str
) -> None:
    with pytest.raises(RankError, match=part):
        ctx.evaluation_loader(dataset, **options)


def test_an_empty_stream_is_said_when_it_is_run_through(ctx: Context) -> None:
    class Empty(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    for loader in (
        ctx.loader(Empty(), batch_size=2, workers=0),
        ctx.evaluation_loader(Empty(), batch_size=2, workers=0),
    ):
        with pytest.raises(RankError, match="the dataset is empty"):
            list(loader)


def test_a_stream_has_no_length(ctx: Context) -> None:
    for loader in (ctx.loader(Stream(), batch_size=2), ctx.evaluation_loader(Stream(), batch_size=2)):
        with pytest.raises(TypeError, match="no length"):
            len(loader)


@pytest.mark.parametrize(
    ("total", "world_size", "fix"),
    [
        (100, 3, "global_batch_size=99 or 102"),
        (2, 3, "global_batch_size=3,"),
        (256, 24, "global_batch_size=240 or 264"),
    ],
)
def test_a_global_batch_that_does_not_divide(total: int, world_size: int, fix: str) -> None:
    with pytest.raises(RankError) as caught:
        batch_sizes(None, total, world_size)
    assert caught.value.what == f"global_batch_size={total} does not divide by {world_size} ranks"
    assert fix in str(caught.value.fix)


def test_sizes_of_a_batch() -> None:
    assert batch_sizes(None, 256, 4) == batch_sizes(64, None, 4) == BatchSize(rank=64, total=256)
    assert BatchSize(64, 256).words(4) == "256 samples (4 ranks x 64)"
    assert BatchSize(64, 64).words(1) == "64 samples (1 rank x 64)"


def test_scaled_learning_rates(ctx: Context) -> None:
    assert Context.scaled_lr(0.1, batch_size=1024, base_batch_size=256) == 0.4
    assert Context.scaled_lr(0.1, batch_size=1024, base_batch_size=256, rule="sqrt") == 0.2
    assert ctx.scaled_lr(0.1, batch_size=64, base_batch_size=256) == 0.025


@pytest.mark.parametrize(
    ("lr", "options", "part"),
    [
        (-0.1, {"batch_size": 1, "base_batch_size": 1}, "invalid learning rate: lr=-0.1"),
        (float("nan"), {"batch_size": 1, "base_batch_size": 1}, "invalid learning rate: lr=nan"),
        (0.1, {"batch_size": 0, "base_batch_size": 1}, "batch_size=0"),
        (0.1, {"batch_size": 1, "base_batch_size": -4}, "base_batch_size=-4"),
        (0.1, {"batch_size": 1, "base_batch_size": 1, "rule": "cubic"}, "rule='cubic'"),
    ],
)
def test_learning_rates_that_make_no_sense(lr: float, options: dict[str, Any], part: str) -> None:
    with pytest.raises(RankError, match=part):
        Context.scaled_lr(lr, **options)


def test_the_size_of_the_batch_is_printed(ctx: Context, capsys: pytest.CaptureFixture[str]) -> None:
    ctx.loader(TEN, batch_size=4)
    ctx.loader(list(range(100)), batch_size=4, workers=2)
    ctx.loader(TEN, batch_size=4, quiet=True)
    assert capsys.readouterr().out.splitlines() == [
        "batch: 4 samples (1 rank x 4), 3 batches an epoch",
        "batch: 4 samples (1 rank x 4), 25 batches an epoch, 2 workers a rank",
    ]


MANY = """
import allranks
from allranks import RankError
with allranks.init(device="cpu") as ctx:
    for call in {calls}:
        try:
            eval(call)
        except RankError as error:
            print(error.what)
"""
WRONG = {
    "ctx.loader(range(10 - ctx.rank), global_batch_size=4)": (
        "the ranks disagree on their data: samples is 9 on rank 1 and 10 on rank 0"
    ),
    "ctx.loader([0] * ctx.is_main, global_batch_size=4)": (
        "the ranks disagree on their data: samples is 0 on rank 1 and 1 on rank 0"
    ),
    "ctx.loader(range(10), batch_size=4, seed=ctx.rank)": (
        "the ranks disagree on their data: seed is 1 on rank 1 and 0 on rank 0"
    ),
    "ctx.loader(range(10), batch_size=4 + ctx.rank)": (
        "the ranks disagree on their data: global_batch_size is 10 on rank 1 and 8 on rank 0"
    ),
    "ctx.loader([5], batch_size=1)": "the dataset has 1 sample, fewer than there are ranks (2)",
    "ctx.loader([], batch_size=1)": "the dataset is empty",
    "ctx.evaluation_loader([5], batch_size=1)": "the dataset has 1 sample, fewer than there are ranks (2)",
    "ctx.loader(range(10), global_batch_size=5)": "global_batch_size=5 does not divide by 2 ranks",
}


def test_every_rank_says_what_is_wrong(run_ranks: Callable[..., list[tuple[int, str, str]]]) -> None:
    for code, out, err in run_ranks(MANY.format(calls=list(WRONG))):
        assert code == 0, err
        assert out.splitlines() == list(WRONG.values())
