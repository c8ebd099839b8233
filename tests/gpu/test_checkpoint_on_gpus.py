"""Checkpoints of state that lies on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SCRIPT = """
import allranks, torch
from torch import nn

def train(ctx, model, optimizer, checkpoints, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 64, device=ctx.device)).square().mean().backward()
        optimizer.step()
        checkpoints.step()

def made(ctx, **options):
    torch.manual_seed(3)
    model = ctx.prepare(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 8)))
    optimizer = ctx.optimizer(torch.optim.AdamW, model, lr=0.01)
    return model, optimizer, ctx.checkpoints("checkpoints", model=model, optimizer=optimizer, **options)

with allranks.init(seed=1) as ctx:
    assert ctx.device.type == "cuda"
    model, optimizer, checkpoints = made(ctx)
    train(ctx, model, optimizer, checkpoints, 5)
    checkpoints.save()
    assert checkpoints._snapshots.buffer.bytes.is_pinned()
    train(ctx, model, optimizer, checkpoints, 5)  # While it is written.
    assert checkpoints.wait()
    whole = [parameter.clone() for parameter in model.parameters()]
with allranks.init(seed=1) as ctx:
    model, optimizer, checkpoints = made(ctx)
    assert checkpoints.resumed.step == 5
    train(ctx, model, optimizer, checkpoints, 5)
    assert all(map(torch.equal, whole, model.parameters()))
    print("equal")
"""


def test_a_training_on_a_gpu_continues_exactly(tmp_path, allranks_env):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=allranks_env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "equal"
