"""What all strategies have in common, and options that belong to one of them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import allranks

HEAD = """
import json, torch, allranks
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

def data(n):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(9))

def worst(model, inputs):
    reference = Branches()
    reference(inputs).square().mean().backward()
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True)]
    return max((full(a) - b).abs().max().item() / b.abs().max().item() for a, b in pairs if b is not None)
"""


def facts_of(results):
    assert [(code, err) for code, _, err in results] == [(0, "")] * len(results), results
    return [json.loads(out.splitlines()[-1]) for _, out, _ in results]


def error_of(names, rank):
    return f"{len(names)} parameters of the model got no gradient on rank {rank}: {', '.join(names)}\n"


def test_fsdp_names_unused_parameters_in_each_step(run_ranks):
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
    for rank, (step, said) in enumerate(facts_of(run_ranks(script))):
        assert step == 1
        assert said.startswith(error_of(["left.weight", "left.bias"], rank))
        assert "find_unused_parameters=True" in said


@pytest.mark.parametrize("strategy", ["flat", "ddp", "fsdp"])
def test_names_are_those_of_the_script_also_with_checkpointed_activations(run_ranks, strategy):
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
    for rank, said in enumerate(facts_of(run_ranks(script))):
        assert said.startswith(error_of(["never.weight", "never.bias"], rank))


def test_fsdp_leaves_alone_what_no_rank_used_where_that_is_expected(run_ranks):
    script = f"""{HEAD}
with allranks.init() as ctx:
    model = ctx.prepare(Branches(), strategy="fsdp", shard=[nn.Linear], find_unused_parameters=True)
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    model(data(4)[ctx.rank * 2 : ctx.rank * 2 + 2]).square().mean().backward()
    apart, never = worst(model, data(4)), model.never.weight.grad is None
    optimizer.step()
    print(json.dumps([apart, never, ctx.progress.step]))
"""
    for apart, never, step in facts_of(run_ranks(script)):
        assert apart < 1e-5
        assert (never, step) == (True, 1)


@pytest.mark.parametrize("compress", ["bf16", "fp16"])
def test_fsdp_sends_compressed_gradients(run_ranks, compress):
    script = f"""{HEAD}
with allranks.init() as ctx:
    model = ctx.prepare(Branches(), strategy="fsdp", compress={compress!r})
    model(data(4)[ctx.rank * 2 : ctx.rank * 2 + 2]).square().mean().backward()
    print(json.dumps([worst(model, data(4)), str(model.used.weight.grad.dtype)]))
"""
    for apart, dtype in facts_of(run_ranks(script)):
        assert 1e-5 < apart < (2**-6 if compress == "bf16" else 2**-9)
        assert dtype == "torch.float32"


@pytest.mark.parametrize("first", [1, 2])
def test_a_static_graph_holds_with_accumulation_and_parameters_that_are_never_used(run_ranks, first):
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
    for apart, sent, static in facts_of(run_ranks(script)):
        assert apart < 1e-5
        assert (sent, static) == ([first, first + 1, first + 2, first + 3], True)


@pytest.mark.parametrize("strategy", ["auto", "flat", "ddp", "fsdp"])
@pytest.mark.parametrize("options", [{}, {"static_graph": True, "find_unused_parameters": True, "compress": "bf16"}])
def test_in_a_world_of_one_every_strategy_is_plain_torch(clean_env, monkeypatch, strategy, options):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def net():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    inputs, module, reference = torch.ones(3, 4), net(), net()
    with allranks.init("gloo") as ctx:
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
