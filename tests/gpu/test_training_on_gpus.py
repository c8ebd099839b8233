"""Models, optimizers and steps on a machine that has GPUs. One is enough, but for the tests that say two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")

HEAD = """
import json, sys
import torch
from torch import nn
import allranks
torch.backends.cuda.matmul.allow_tf32 = False
def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 300), nn.Tanh(), nn.Linear(300, 2))
def data():
    g = torch.Generator().manual_seed(9)
    return torch.randn(8, 8, generator=g), torch.randn(8, 2, generator=g)
def full(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t
def tell(**facts):
    sys.stdout.write(json.dumps(facts) + "\\n")
"""


@pytest.fixture
def ranks(tmp_path):
    """Give a function that runs a script on some ranks, each with the GPU of its number, and gives what they told."""

    def run(script, world_size):
        path = tmp_path / "script.py"
        path.write_text(HEAD + script)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {**os.environ, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        pipe = subprocess.PIPE
        processes = [
            subprocess.Popen(
                [sys.executable, str(path)],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=pipe,
                stderr=pipe,
                text=True,
            )
            for rank in range(world_size)
        ]
        results = [(*process.communicate(timeout=150), process.returncode) for process in processes]
        assert [code for _, _, code in results] == [0] * world_size, results
        return [json.loads(out.splitlines()[-1]) for out, _, _ in results]

    return run


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_gpu_learns_in_each_precision(ranks, precision):
    script = f"""
with allranks.init(precision={precision!r}) as ctx:
    model = ctx.prepare(net())
    optimizer = ctx.optimizer(torch.optim.AdamW, model, lr=0.01, clip_norm=1.0)
    x, y = (part.to(ctx.device) for part in data())
    losses = []
    for _ in range(60):
        with ctx.autocast():
            loss = nn.functional.mse_loss(model(x).float(), y)
        ctx.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    tell(first=losses[0].item(), last=losses[-1].item(), fused=optimizer.param_groups[0]["fused"],
         device=str(next(model.parameters()).device), step=ctx.progress.step)
"""
    (facts,) = ranks(script, 1)
    assert facts["last"] < facts["first"] / 4
    assert (facts["fused"], facts["device"], facts["step"]) == (True, "cuda:0", 60)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_does_not_wait_for_the_gpu(ranks, precision):
    """torch raises where the host would read from the device."""
    script = f"""
with allranks.init(precision={precision!r}) as ctx:
    model = ctx.prepare(net())
    optimizer = ctx.optimizer(torch.optim.AdamW, model, lr=0.01, clip_norm=1.0)
    x, y = (part.to(ctx.device) for part in data())
    for number in range(6):
        if number == 2:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        with ctx.accumulate(model, steps=2), ctx.autocast():
            ctx.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    tell(step=ctx.progress.step)
"""
    assert ranks(script, 1) == [{"step": 3}]


@two_gpus
@pytest.mark.parametrize("strategy", ["auto", "flat", "ddp", "fsdp"])
def test_two_gpus_average(ranks, strategy):
    script = f"""
with allranks.init() as ctx:
    x, y = (part.to(ctx.device) for part in data())
    reference = net().to(ctx.device)
    nn.functional.mse_loss(reference(x), y).backward()
    model = ctx.prepare(net(), strategy={strategy!r})
    optimizer = ctx.optimizer(torch.optim.AdamW, model, lr=0.01)
    mine = slice(ctx.rank * 4, ctx.rank * 4 + 4)
    for half in (slice(0, 2), slice(2, 4)):
        with ctx.accumulate(model, steps=2):
            ctx.backward(nn.functional.mse_loss(model(x[mine][half]), y[mine][half]))
        optimizer.step()
    worst = max((full(a.grad) - b.grad).abs().max().item()
                for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    tell(worst=worst, kind=type(model).__name__)
"""
    for facts in ranks(script, 2):
        assert facts["worst"] < 1e-5


def test_compiled_and_channels_last(ranks):
    script = """
with allranks.init(precision="bf16") as ctx:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
    keys = [*module.state_dict()]
    model = ctx.prepare(module, compile=True, channels_last=True)
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    with ctx.autocast():
        loss = model(torch.randn(2, 3, 8, 8, device=ctx.device)).float().square().mean()
    ctx.backward(loss)
    optimizer.step()
    last = model[0].weight.is_contiguous(memory_format=torch.channels_last)
    tell(keys=keys == [*model.state_dict()], last=last, finite=bool(torch.isfinite(loss)))
"""
    assert ranks(script, 1) == [{"keys": True, "last": True, "finite": True}]
