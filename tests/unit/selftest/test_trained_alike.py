"""All ranks together and one by itself come to the same, also where a container has float32 multiplied as TF32."""

from __future__ import annotations

from pathlib import Path

from reported import reports_of

from allranks.checks.selftest import judged
from recorded_trial import trial_of
from warm_python import WarmPython

#: What a GPU does to float32 then, on a CPU: of the 23 digits of what it multiplies 13 are dropped.
SCRIPT = """\
import torch
import allranks
from allranks.record.selftest import send
from allranks.selftest.computing import train

def rounded(values):
    if values.dtype != torch.float32:
        return values
    return ((values.contiguous().view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)

class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return rounded(x) @ rounded(weight).t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return rounded(grad) @ rounded(weight), rounded(grad).t() @ rounded(x), grad.sum(0)

torch.nn.functional.linear = Linear.apply
with allranks.init(backend="gloo") as ctx:
    send(train(ctx, "auto"))
"""


def test_where_float32_is_not_exact(tmp_path: Path, warm_ranks: WarmPython) -> None:
    told = reports_of(SCRIPT, [], tmp_path, warm_ranks, 3, 3)
    (training,) = [part for part in judged(trial_of(told, size=3)) if part.kind == "training"]
    assert training.wrong == ""
    losses = training.figures["losses"]
    assert losses[-1] < losses[0]
