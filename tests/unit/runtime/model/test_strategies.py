"""What all strategies have in common, and options that belong to one of them."""

from __future__ import annotations

import pytest
import torch
from small_training import net
from torch import nn

HEAD = """
import json, sys, torch, allranks
from torch import nn
from allranks import RankError
torch.set_num_threads(1)

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.used, self.left, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
    def forward(self, x, left=True):
        return self.left(self.used(x)) if left else self.used(x)

def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

def tell(**facts):
    sys.stdout.write(json.dumps(facts) + "\\n")

def data(n):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(9))

def worst(model, inputs):
    reference = Branches()
    reference(inputs).square().mean().backward()
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True)]
    return max((full(a) - b).abs().max().item() / b.abs().max().item() for a, b in pairs if b is not None)
"""

#: Where even the smallest gradients go through shared memory.
SHARED = f"{HEAD}\nfrom allranks.runtime.model import allreduce\nallreduce.LEAST = 0\n"


def error_of(names, rank):
    return f"{len(names)} parameters of the model got no gradient on rank {rank}: {', '.join(names)}\n"


def test_fsdp_names_unused_parameters_in_each_step(facts_of):
    script = f"""{HEAD}
with allranks.init() as ctx:
    model = ctx.prepare(Branches(), strategy="fsdp", shard=[nn.Linear], checkpoint_activations=[nn.Linear])
    model.never.requires_grad_(False)
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    said = []
    for left in (True, False):
        model(data(2), left).sum().backward()
        try:
            optimizer.step()
        except RankError as error:
            said.append(str(error))
        optimizer.zero_grad()
    print(json.dumps([ctx.progress.step, *said]))
"""
    for rank, (step, said) in enumerate(facts_of(script)):
        assert step == 1
        assert said.startswith(error_of(["left.weight", "left.bias"], rank))
        assert "find_unused_parameters=True" in said


@pytest.mark.parametrize("strategy", ["flat", "ddp", "fsdp"])
def test_names_are_those_of_the_script_also_with_checkpointed_activations(facts_of, strategy):
    script = f"""{HEAD}
with allranks.init() as ctx:
    model = ctx.prepare(Branches(), strategy={strategy!r}, checkpoint_activations=[nn.Linear])
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    try:
        model(data(2)).sum().backward()
        optimizer.step()
    except RankError as error:
        print(json.dumps(str(error)))
"""
    for rank, said in enumerate(facts_of(script)):
        assert said.startswith(error_of(["never.weight", "never.bias"], rank))


def test_fsdp_leaves_alone_what_no_rank_used_where_that_is_expected(facts_of):
    script = f"""{HEAD}
with allranks.init() as ctx:
    model = ctx.prepare(Branches(), strategy="fsdp", shard=[nn.Linear], find_unused_parameters=True)
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    model(data(4)[ctx.rank * 2 : ctx.rank * 2 + 2]).square().mean().backward()
    apart, never = worst(model, data(4)), model.never.weight.grad is None
    optimizer.step()
    print(json.dumps([apart, never, ctx.progress.step]))
"""
    for apart, never, step in facts_of(script):
        assert apart < 1e-5
        assert (never, step) == (True, 1)


@pytest.mark.parametrize("compress", ["bf16", "fp16"])
def test_fsdp_sends_compressed_gradients(facts_of, compress):
    script = f"""{HEAD}
with allranks.init() as ctx:
    model = ctx.prepare(Branches(), strategy="fsdp", compress={compress!r})
    model(data(4)[ctx.rank * 2 : ctx.rank * 2 + 2]).square().mean().backward()
    print(json.dumps([worst(model, data(4)), str(model.used.weight.grad.dtype)]))
"""
    for apart, dtype in facts_of(script):
        assert 1e-5 < apart < (2**-6 if compress == "bf16" else 2**-9)
        assert dtype == "torch.float32"


@pytest.mark.parametrize("first", [1, 2])
def test_a_static_graph_holds_with_accumulation_and_parameters_that_are_never_used(facts_of, first):
    """torch fails inside if the first backward pass of all sends nothing."""
    script = f"""{HEAD}
with allranks.init() as ctx:
    model = ctx.prepare(Branches(), strategy="ddp", static_graph=True)
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.0)
    found, sent = [], []
    for steps in ({first}, 3, 1, 2):
        for number in range(steps):
            at = number * 4 + ctx.rank * 2
            with ctx.accumulate(model, steps=steps):
                ctx.backward(model(data(12)[at : at + 2]).square().mean())
            optimizer.step()
        found.append(worst(model, data(12)[: 4 * steps]))
        sent.append(ctx.progress.backwards)
        optimizer.zero_grad()
    print(json.dumps([max(found), sent, model.static_graph]))
"""
    for apart, sent, static in facts_of(script):
        assert apart < 1e-5
        assert (sent, static) == ([first, first + 1, first + 2, first + 3], True)


def test_running_statistics_are_those_of_rank_0(facts_of):
    script = f"""{SHARED}
with allranks.init() as ctx:
    model = ctx.prepare(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), channels_last=True)
    torch.manual_seed(ctx.rank)
    for _ in range(3):
        model(torch.randn(2, 2, 6, 6)).sum().backward()
    before = model.module[1].running_mean.tolist()
    with torch.no_grad():
        model(torch.randn(2, 2, 6, 6))  # Without gradients nothing is sent.
    model.train()
    model(torch.randn(2, 2, 6, 6)).sum()
    weight = model.module[0].weight
    tell(kind=type(model).__name__, tracked=model.module[1].num_batches_tracked.item(), before=before,
         last=weight.is_contiguous(memory_format=torch.channels_last), strides=weight.grad.stride() == weight.stride())
"""
    first, second = facts_of(script)
    assert first["before"] != second["before"]  # Of its own batch, after the forward pass, as with DDP.
    for facts in (first, second):
        assert (facts["kind"], facts["tracked"], facts["last"], facts["strides"]) == ("Flat", 5, True, True)


def test_unused_parameters_are_named_or_allowed(facts_of):
    script = f"""{SHARED}
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.left, self.never = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    def forward(self, x, left=False):
        return self.left(self.used(x)) if left else self.used(x)
with allranks.init() as ctx:
    found = {{}}
    for strategy in ("flat", "ddp"):
        model = ctx.prepare(Branches(), strategy=strategy)
        optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
        try:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        except RankError as error:
            found[strategy] = str(error)
        model = ctx.prepare(Branches(), strategy=strategy, find_unused_parameters=True)
        optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
        model(torch.ones(1, 2), left=ctx.rank == 0).sum().backward()
        inner = model.module
        found[strategy + " grads"] = [inner.left.bias.grad.tolist(), inner.never.bias.grad is None]
        optimizer.step()
    model = ctx.prepare(Branches(), strategy="ddp")  # Without our optimizer, torch notices in the next step.
    model(torch.ones(1, 2)).sum().backward()
    try:
        model(torch.ones(1, 2))
    except RankError as error:
        found["late"] = str(error)
    tell(**found)
"""
    for rank, facts in enumerate(facts_of(script)):
        for when in ("flat", "ddp", "late"):
            names = "left.weight, left.bias, never.weight, never.bias"
            assert facts[when].startswith(f"4 parameters of the model got no gradient on rank {rank}: {names}\n")
            assert "find_unused_parameters=True" in facts[when]
        assert facts["flat grads"] == facts["ddp grads"] == [[0.5, 0.5], True]


def test_ranks_with_different_models(facts_of):
    script = f"""{SHARED}
with allranks.init() as ctx:
    try:
        ctx.prepare(nn.Linear(3, 2 + (ctx.rank == 1)))
    except RankError as error:
        tell(error=str(error))
"""
    for facts in facts_of(script):
        assert facts["error"].startswith("rank 1 made another model than rank 0\n")
        assert "rank 0 has bias (2,)" in facts["error"]
        assert "rank 1 has bias (3,)" in facts["error"]


def test_buffers_that_a_model_assigns_anew_are_those_of_rank_0(facts_of):
    script = f"""{SHARED}
class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("mean", torch.zeros(1))
    def forward(self, x):
        seen = self.mean.item()
        self.mean = 0.5 * self.mean + x.mean().reshape(1)
        return self.layer(x), seen
with allranks.init() as ctx:
    model = ctx.prepare(Average(), strategy="flat")
    seen = []
    for _ in range(3):
        out, mean = model(torch.full((2, 1), 1.0 + ctx.rank))
        out.sum().backward()
        seen.append(mean)
    tell(seen=seen)
"""
    assert facts_of(script) == [{"seen": [0.0, 1.0, 1.5]}] * 2


@pytest.mark.parametrize("strategy", ["flat", "ddp", "fsdp"])
def test_backward_passes_are_counted_once_whoever_calls_them(facts_of, strategy):
    script = f"""{SHARED}
with allranks.init() as ctx:
    model = ctx.prepare(nn.Linear(2, 1), strategy={strategy!r})
    counts = []
    for own in (True, False):
        loss = model(torch.ones(1, 2)).sum()
        ctx.backward(loss) if own else loss.backward()
        counts.append([ctx.progress.backwards, ctx.progress.weighed])
    tell(counts=counts)
"""
    assert facts_of(script) == [{"counts": [[1, 1], [2, 1]]}] * 2


def test_the_model_inside_works_on_rank_0_alone(facts_of):
    script = f"""{SHARED}
with allranks.init() as ctx:
    found = []
    for strategy in ("flat", "ddp"):
        module = nn.BatchNorm1d(2)
        model = ctx.prepare(module, strategy=strategy)
        out = ctx.on_main(lambda: ctx.unwrap(model)(torch.ones(4, 2)).sum().item())
        found.append([ctx.unwrap(model) is module, out])
    tell(found=found)
"""
    assert facts_of(script) == [{"found": [[True, 0.0]] * 2}] * 2


@pytest.mark.parametrize("strategy", ["auto", "flat", "ddp", "fsdp"])
@pytest.mark.parametrize("options", [{}, {"static_graph": True, "find_unused_parameters": True, "compress": "bf16"}])
def test_in_a_world_of_one_every_strategy_is_plain_torch(start, strategy, options):
    inputs, module, reference = torch.ones(3, 4), net(), net()
    ctx = start()
    model = ctx.prepare(module, strategy=strategy, shard=[nn.Linear], **options)
    assert model is module is ctx.unwrap(model)
    optimizer = ctx.optimizer(torch.optim.AdamW, model, lr=0.1, fused=False)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1, fused=False)
    for _ in range(3):
        for one, its in ((model, optimizer), (reference, theirs)):
            its.zero_grad()
            one(inputs).square().mean().backward()
            its.step()
    assert ctx.progress.step == 3
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), reference.parameters(), strict=True))
