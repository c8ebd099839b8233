"""Calls of the Python API that do not fit: what is expected, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import allranks
from allranks.errors import CallError, RankError
from allranks.runtime.context import Context

MODEL = torch.nn.Linear(2, 2)
SGD = torch.optim.SGD


@pytest.fixture(scope="module")
def ctx() -> Iterator[Context]:
    with allranks.init(backend="gloo") as made:
        yield made


@pytest.mark.parametrize(
    ("call", "what", "fix"),
    [
        (lambda ctx: ctx.prepare(MODEL, SGD), "ctx.prepare() got more than it takes: type", "ctx.optimizer()"),
        (lambda ctx: ctx.prepare(MODEL, stratgy="ddp"), "ctx.prepare() has no argument 'stratgy'", "mean strategy=?"),
        (lambda ctx: ctx.prepare(MODEL, device_ids=[0]), "has no argument 'device_ids'", "leave it out"),
        (lambda ctx: ctx.loader([1], num_workers=2), "ctx.loader() has no argument 'num_workers'", "write workers="),
        (lambda ctx: ctx.loader([1], sampler=None), "ctx.loader() has no argument 'sampler'", "shuffle="),
        (lambda ctx: ctx.loader([1], 32), "ctx.loader() got more than it takes: int", "batch_size=..."),
        (lambda ctx: ctx.loader(batch_size=1), "ctx.loader() got no dataset", None),
        (lambda ctx: ctx.optimizer(SGD), "ctx.optimizer() got no model", None),
        (lambda ctx: ctx.optimizer(SGD, MODEL, max_norm=1), "nor SGD has an argument 'max_norm'", "write clip_norm="),
        (lambda ctx: ctx.optimizer(SGD, MODEL, momentun=1), "argument 'momentun'", "did you mean momentum=?"),
        (lambda ctx: ctx.checkpoints(MODEL, SGD), "ctx.checkpoints() got more than it takes: type", "model=model"),
        (lambda ctx: ctx.accumulate(4), "ctx.accumulate() got no steps", None),
        (lambda ctx: ctx.print(".", end=""), "ctx.print() has no argument 'end'", "print() if ctx.is_main"),
        (lambda ctx: ctx.metrics.log({"loss": 1}), "metrics.log() got more than it takes: dict", "log(loss=loss)"),
        (lambda ctx: allranks.init("gloo", "cpu"), "allranks.init() got more than it takes: str", "seed=..."),
        (lambda ctx: allranks.init(mixed_precision=1), "argument 'mixed_precision'", 'precision="bf16"'),
    ],
)
def test_arguments_that_a_function_does_not_take(ctx: Context, call: Any, what: str, fix: str | None) -> None:
    with pytest.raises(CallError) as caught:
        call(ctx)
    assert what in caught.value.what
    assert (caught.value.why or "").startswith(("its arguments: ", "it takes no arguments"))
    assert (fix in (caught.value.fix or "")) if fix else caught.value.fix is None


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda ctx, _: ctx.sum([1, 2]), "ctx.sum() got list"),
        (lambda ctx, _: ctx.sum(torch.ones(3)), "ctx.sum() got Tensor"),
        (lambda ctx, _: ctx.on_main(None), "ctx.on_main() got NoneType"),
        (lambda ctx, path: ctx.checkpoints(path, save_every=9, m=MODEL), "ctx.checkpoints(save_every=...): int has no"),
        (lambda ctx, path: _saved(ctx, path).save("last.pt"), "checkpoints.save() got str as its metric"),
        (lambda ctx, path: _saved(ctx, path).step(MODEL), "checkpoints.step() got Linear as its metric"),
    ],
)
def test_arguments_of_a_wrong_type(ctx: Context, tmp_path: Path, call: Any, what: str) -> None:
    with pytest.raises(RankError) as caught:
        call(ctx, tmp_path)
    assert caught.value.what.startswith(what)
    assert caught.value.fix


def _saved(ctx: Context, path: Path) -> Any:
    for close in reversed(ctx.closing):
        if getattr(close, "__name__", "") == "close":
            close()
    return ctx.checkpoints(path, model=MODEL)


def test_an_error_of_the_code_itself_stays_as_it_is(ctx: Context) -> None:
    def broken(_: object) -> None:
        raise TypeError("of the dataset")

    with pytest.raises(TypeError, match=r"^of the dataset$"):
        next(iter(ctx.loader([1], batch_size=1, collate_fn=broken, workers=0, quiet=True)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wait_for_everyone", "ctx has no 'wait_for_everyone': write ctx.barrier()"),
        ("is_main_process", "ctx has no 'is_main_process': write ctx.is_main"),
        ("word_size", "ctx has no 'word_size': write ctx.world_size"),
        ("umbrella", "ctx has no 'umbrella'"),
    ],
)
def test_attributes_of_other_tools(ctx: Context, name: str, message: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(ctx, name)
    assert str(caught.value) == message


def test_a_call_after_the_with_block(run_ranks: Any) -> None:
    script = "import allranks\nwith allranks.init() as ctx:\n    pass\nctx.sum(1.0)\n"
    for code, _, stderr in run_ranks(script):
        assert code == 1
        assert "RankError: ctx.sum() was called after the context was closed" in stderr
        assert "fix: move the call into the with block" in stderr
