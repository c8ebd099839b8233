"""What the first step of an optimizer finds: that it trains nothing, or each rank a model of its own."""

from __future__ import annotations

from typing import Any

import pytest

TRAINING = """
import torch
import allranks

def raw():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

def step(ctx, model, optimizer):
    ctx.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()

with allranks.init() as ctx:
    {0}
"""

SHARDED_AFTER = """
    model = raw()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    model = ctx.prepare(model, strategy="fsdp")
    step(ctx, model, optimizer)
"""
UNPREPARED = """
    model = raw()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    step(ctx, model, optimizer)
    step(ctx, model, optimizer)
"""
PREPARED_AFTER = """
    model = raw()
    optimizer = ctx.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    model = ctx.prepare(model, strategy="{}")
    step(ctx, model, optimizer)
"""
WRAPPED_BY_THE_SCRIPT = """
    model = raw()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    step(ctx, torch.nn.parallel.DistributedDataParallel(model), optimizer)
"""


def test_an_optimizer_of_parameters_that_were_replaced_is_refused(run_ranks: Any) -> None:
    for code, _, stderr in run_ranks(TRAINING.format(SHARDED_AFTER)):
        assert code == 1
        assert "RankError: optimizer.step() would train nothing: no parameter of the optimizer has a gradient" in stderr
        assert 'fix: first model = ctx.prepare(model, strategy="fsdp"), then ctx.optimizer(..., model)' in stderr


def test_a_model_that_was_not_prepared_is_named_once(run_ranks: Any) -> None:
    (code, _, first), (other, _, second) = run_ranks(TRAINING.format(UNPREPARED))
    assert (code, other, second) == (0, 0, "")
    assert first == (
        "allranks: warning: the model of this optimizer was not given to ctx.prepare(): each of the 2 ranks trains one "
        "of its own, unless the script averages the gradients; write model = ctx.prepare(model)\n"
    )


@pytest.mark.parametrize(
    "script",
    [PREPARED_AFTER.format("flat"), PREPARED_AFTER.format("ddp"), WRAPPED_BY_THE_SCRIPT],
    ids=["flat", "ddp", "torch"],
)
def test_gradients_that_are_averaged_are_not_warned_of(run_ranks: Any, script: str) -> None:
    assert [(code, stderr) for code, _, stderr in run_ranks(TRAINING.format(script))] == [(0, ""), (0, "")]
