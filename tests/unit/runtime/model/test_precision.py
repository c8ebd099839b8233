"""Mixed precision, activation checkpointing, compiling and sharding."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch import nn

HEAD = """
import json, sys
import torch
from torch import nn
import allranks
torch.set_num_threads(1)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))
def net():
    torch.manual_seed(5)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))
def data(n=8):
    g = torch.Generator().manual_seed(9)
    return torch.randn(n, 8, generator=g), torch.randn(n, 2, generator=g)
def full(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t
def tell(**facts):
    sys.stdout.write(json.dumps(facts) + "\\n")
"""


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast(start, precision, dtype):
    ctx = start(precision=precision)
    model = ctx.prepare(net())
    with ctx.autocast():
        out = model(torch.ones(2, 8))
    assert (out.dtype, model[0].weight.dtype) == (dtype, torch.float32)


def test_fp32_is_no_block_at_all(start):
    ctx = start()
    assert ctx.autocast() is ctx.autocast()
    with ctx.autocast():
        assert not torch.is_autocast_enabled("cpu")
    assert ctx.scaler.state_dict() == {}


@pytest.mark.parametrize("options", [{}, {"fused": False}])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_fp16_scales_and_skips_a_step_that_overflowed(start, options, clip):
    ctx = start(precision="fp16")
    model, reference = ctx.prepare(net()), net()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1, clip_norm=clip, **options)
    scale = 2.0**16
    inputs = torch.ones(2, 8)
    for number, blow_up in enumerate([1.0, 1e38, 1.0]):
        before = [parameter.clone() for parameter in model.parameters()]
        ctx.backward(model(inputs).square().mean() * blow_up)
        optimizer.step()
        optimizer.zero_grad()
        changed = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
        assert changed == [blow_up == 1.0] * 4
        assert ctx.progress.step == number + 1
        scale *= 1.0 if blow_up == 1.0 else 0.5
        assert ctx.scaler.state_dict()["scale"] == scale
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        plain.zero_grad()
        reference(inputs).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        plain.step()
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


def test_two_optimizers_share_a_backward_pass_with_fp16(start):
    """The scale must not change between their steps, though the first of them overflowed."""
    ctx = start(precision="fp16")
    first, second = ctx.prepare(net()), ctx.prepare(net())
    optimizers = [ctx.optimizer(torch.optim.SGD, model, lr=0.1, clip_norm=1e9) for model in (first, second)]
    inputs = torch.ones(2, 8)
    ctx.backward(first(inputs).mean() * 1e38 + second(inputs).mean())
    for optimizer in optimizers:
        optimizer.step()
    reference = net()
    reference(inputs).mean().backward()
    for mine, expected in zip(second.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)
    assert ctx.scaler.state_dict()["scale"] == 2.0**15


@pytest.mark.parametrize("strategy", ["flat", "ddp", "fsdp"])
def test_checkpointed_activations_give_the_same_gradients(facts_of, strategy):
    script = f"""{HEAD}
with allranks.init() as ctx:
    grads, calls, keys = [], [], []
    x, y = data()
    for classes in ((), (Block,)):
        module = net()
        count = [0]
        module[0].a.register_forward_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        model = ctx.prepare(module, strategy={strategy!r}, checkpoint_activations=classes, shard=(Block,))
        nn.functional.mse_loss(model(x), y).backward()
        grads.append([full(p.grad).tolist() for p in model.parameters()])
        calls.append(count[0])
        keys.append([*model.state_dict()])
    tell(same=grads[0] == grads[1], calls=calls, keys=keys[0] == keys[1])
"""
    for facts in facts_of(script):
        assert facts == {"same": True, "calls": [1, 2], "keys": True}


def test_fsdp_shards_and_gives_the_gradients_of_all_samples(facts_of):
    script = f"""{HEAD}
with allranks.init(precision="fp32") as ctx:
    x, y = data()
    reference = net()
    nn.functional.mse_loss(reference(x), y).backward()
    module = net()
    if ctx.rank:
        with torch.no_grad():
            module[0].a.weight.zero_()
    model = ctx.prepare(module, strategy="fsdp", shard=[Block])
    optimizer = ctx.optimizer(torch.optim.AdamW, model, lr=0.1)
    quiet = []
    for micro in range(2):
        at = micro * 4 + ctx.rank * 2
        with ctx.accumulate(model, steps=2):
            ctx.backward(nn.functional.mse_loss(model(x[at : at + 2]), y[at : at + 2]))
        quiet.append(model[2].weight.grad is None)
        optimizer.step()
    worst = max((full(a.grad) - b.grad).abs().max().item()
                for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    torch.optim.AdamW(reference.parameters(), lr=0.1).step()
    apart = max((full(a) - b).abs().max().item()
                for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    from allranks.runtime.model.flat_gradients import unwrap
    tell(worst=worst, apart=apart, quiet=quiet, local=list(model[0].a.weight.to_local().shape),
         same=unwrap(model) is module, fused=optimizer.param_groups[0]["fused"])
"""
    for facts in facts_of(script):
        assert facts["worst"] < 1e-6
        assert facts["apart"] < 1e-4
        assert (facts["quiet"], facts["local"], facts["same"]) == ([True, False], [8, 8], True)


def test_fsdp_with_fp16_skips_on_all_ranks_what_overflowed_on_one(facts_of):
    script = f"""{HEAD}
with allranks.init(precision="fp16") as ctx:
    x, y = data()
    model = ctx.prepare(net(), strategy="fsdp", shard=[Block])
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1, clip_norm=1.0)
    weights = lambda: [full(p.detach()).clone() for p in model.parameters()]
    ctx.scaler._init_scale = 8.0
    moved = []
    for size in (1.0, 1e30, 1.0):
        before = weights()
        with ctx.autocast():
            loss = nn.functional.mse_loss(model(x).float(), y)
        ctx.backward(loss)
        if size > 1 and ctx.rank == 1:
            model[2].bias.grad.to_local().fill_(float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, weights(), strict=True)))
    tell(moved=moved, scale=ctx.scaler.state_dict()["scale"])
"""
    for facts in facts_of(script):
        assert facts == {"moved": [True, False, True], "scale": 4.0}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler, g++")
@pytest.mark.timeout(300)
def test_a_compiled_model_keeps_its_keys_and_gradients(run_ranks):
    """It takes more than 10 s on a slow machine: both ranks compile the model, with g++."""
    script = f"""{HEAD}
import warnings
warnings.simplefilter("ignore")
with allranks.init() as ctx:
    x, y = data()
    reference = net()
    nn.functional.mse_loss(reference(x), y).backward()
    model = ctx.prepare(net(), compile=True)
    nn.functional.mse_loss(model(x), y).backward()
    worst = max((a.grad - b.grad).abs().max().item()
                for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    compiled = model.module._compiled_call_impl is not None
    tell(worst=worst, keys=[*model.module.state_dict()] == [*reference.state_dict()], compiled=compiled)
"""
    (code, out, err), *_ = run_ranks(script, world_size=2)
    assert code == 0, err
    facts = json.loads(out.splitlines()[-1])
    assert facts["worst"] < 1e-5
    assert facts["keys"]
    assert facts["compiled"]
