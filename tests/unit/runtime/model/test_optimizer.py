"""``ctx.optimizer`` in one process and over ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from small_training import batch, net
from torch import nn

from allranks.errors import RankError


def test_a_model_alone_comes_back_as_it_is(start):
    model = net()
    assert start().prepare(model) is model


def test_a_model_without_parameters(start):
    ctx = start()
    with pytest.raises(RankError, match="the model, ReLU, has no parameters to train\n  why: it has none at all"):
        ctx.prepare(nn.ReLU())
    with pytest.raises(RankError, match="all its 2 parameters are frozen"):
        ctx.prepare(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(RankError, match="the optimizer got no parameters"):
        ctx.optimizer(torch.optim.SGD, [], lr=0.1)


def test_classes_that_do_not_occur_are_named_with_those_that_do(start):
    ctx = start()
    with pytest.raises(RankError, match=r"shard: the model has no Conv2d inside(.|\n)*Linear, Tanh"):
        ctx.prepare(net(), shard=[nn.Conv2d])
    with pytest.raises(RankError, match="checkpoint_activations: the model has no Conv2d inside"):
        ctx.prepare(net(), checkpoint_activations=[nn.Conv2d])


@pytest.mark.parametrize(("name", "value"), [("strategy", "dp"), ("compress", "int8")])
def test_words_that_mean_nothing(start, name, value):
    with pytest.raises(RankError, match=repr(value)):
        start().prepare(net(), **{name: value})


def test_it_is_an_optimizer_of_its_class_with_schedulers_and_state(start):
    ctx = start()
    model = net()
    optimizer = ctx.optimizer(torch.optim.AdamW, model, lr=0.1, weight_decay=0.5)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert repr(optimizer).startswith("AdamW (")
    assert optimizer.param_groups[0]["fused"] is True
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    hooks = []
    optimizer.register_step_post_hook(lambda *_: hooks.append(1))
    reference = copy.deepcopy(model)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.5, fused=True)
    their_schedule = torch.optim.lr_scheduler.StepLR(theirs, 1, 0.5)
    for seed in range(3):
        for one, its_optimizer, its_schedule in ((model, optimizer, schedule), (reference, theirs, their_schedule)):
            its_optimizer.zero_grad()
            one(batch(seed)).square().mean().backward()
            its_optimizer.step()
            its_schedule.step()
        if seed == 0:  # Another object, with the state of the first.
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = ctx.optimizer(torch.optim.AdamW, model, lr=9.0)
            optimizer.load_state_dict(saved)
            optimizer.register_step_post_hook(lambda *_: hooks.append(1))
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            schedule.load_state_dict({**their_schedule.state_dict()})
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), reference.parameters(), strict=True))
    assert optimizer.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    assert hooks == [1, 1, 1]


def test_an_optimizer_of_the_scripts_own_steps_as_one_that_the_context_made(run_ranks):
    """On two ranks, with clipping and micro-batches: made before and after the model is prepared."""
    script = """
import allranks, torch
def train(how):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    options = {"lr": 0.1, "weight_decay": 0.5, "fused": True}
    with allranks.init("gloo") as ctx:
        own = torch.optim.AdamW(model.parameters(), **options) if how == "before" else None
        model = ctx.prepare(model)
        if how == "class":
            optimizer = ctx.optimizer(torch.optim.AdamW, model, clip_norm=0.01, **options)
        else:
            own = own or torch.optim.AdamW(model.parameters(), **options)
            optimizer = ctx.optimizer(own, model, clip_norm=0.01)
            assert optimizer is own and type(own).__name__ == "AdamW" and isinstance(own, torch.optim.AdamW)
        torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for seed in range(4):
            with ctx.accumulate(model, steps=2):
                ctx.backward(model(torch.full((2, 4), seed + ctx.rank + 1.0)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert ctx.progress.step == 2
        return [parameter.tolist() for parameter in model.parameters()]
made = train("class")
assert train("before") == made and train("after") == made
print("equal")
"""
    assert [(code, out, err) for code, out, err in run_ranks(script)] == [(0, "equal\n", "")] * 2


def test_an_optimizer_of_the_scripts_own_that_would_not_do_what_it_expects(start):
    ctx = start()
    model = net()

    def refused(first, *options, **more):
        with pytest.raises(RankError) as caught:
            ctx.optimizer(first, model, *options, **more)
        assert "ctx.optimizer(torch.optim.SGD, model, lr=" in caught.value.fix
        return caught.value.in_a_line

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    with pytest.raises(RankError) as swapped:
        ctx.optimizer(model, torch.optim.SGD, lr=0.1)
    assert swapped.value.what == f"ctx.optimizer() got {type(model).__name__} as its first argument"

    cannot = "ctx.optimizer() cannot use this SGD: "
    other = cannot + "its parameters are not those that the model has now, after ctx.prepare()"
    assert refused(sgd(net().parameters())) == other
    assert refused(sgd(model[0].parameters())) == other
    own = sgd(model.parameters())
    assert refused(own, weight_decay=1.0, scale_lr="linear") == (
        cannot + "it has its options already, and would not take weight_decay, scale_lr"
    )
    assert refused(ctx.optimizer(own, model)) == cannot + "ctx.optimizer() has returned it before"
    scheduled = sgd(model.parameters())
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert refused(scheduled).startswith(cannot + "its step() was replaced, as a scheduler does")
    assert refused("SGD") == "ctx.optimizer() got str as its first argument: expected the class of an optimizer"
    assert refused(nn.Linear).startswith("ctx.optimizer() got type as its first argument")


def test_what_is_no_model_is_not_prepared(start):
    with pytest.raises(RankError) as caught:
        start().prepare("model")
    assert (caught.value.what, caught.value.why) == (
        "ctx.prepare() got str as its first argument",
        "expected the model, a torch.nn.Module",
    )


def test_the_first_optimizer_counts_steps(start):
    ctx = start()
    models = net(), net()
    first, second = (ctx.optimizer(torch.optim.SGD, model, lr=0.1) for model in models)
    for _ in range(2):
        ctx.backward(sum(model(batch(0)).sum() for model in models))
        first.step()
        second.step()
    assert ctx.progress.step == 2


@pytest.mark.parametrize(
    ("cls", "options", "fused"),
    [
        (torch.optim.SGD, {}, True),
        (torch.optim.Adam, {"fused": False}, False),
        (torch.optim.Adam, {"foreach": True}, None),
        (torch.optim.Adagrad, {}, True),
        (torch.optim.RMSprop, {}, "none"),
        (torch.optim.LBFGS, {}, "none"),
    ],
)
def test_fused_where_the_class_can_and_nobody_decided(start, cls, options, fused):
    optimizer = start().optimizer(cls, net(), lr=0.01, **options)
    assert optimizer.param_groups[0].get("fused", "none") == fused
    for name, value in options.items():
        assert optimizer.param_groups[0][name] == value


def test_groups_of_parameters_and_frozen_ones(start):
    ctx = start()
    model = net()
    model[0].weight.requires_grad_(False)
    assert len(ctx.optimizer(torch.optim.SGD, model, lr=0.1).param_groups[0]["params"]) == 3
    groups = [{"params": model[0].parameters(), "lr": 1.0}, {"params": model[2].parameters()}]
    optimizer = ctx.optimizer(torch.optim.SGD, groups, lr=0.1, scale_lr="linear")
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [(2, 1.0), (2, 0.1)]


def test_scaled_learning_rate(run_ranks):
    script = """
import torch, allranks
with allranks.init() as ctx:
    make = lambda how: ctx.optimizer(torch.optim.SGD, [torch.ones(1)], lr=0.5, scale_lr=how).param_groups[0]["lr"]
    print(make("linear"), make("sqrt"), make(None))
"""
    assert [out for _, out, _ in run_ranks(script)] == [f"1.0 {0.5 * 2**0.5} 0.5\n"] * 2


def test_lbfgs_with_a_closure(start):
    ctx = start()
    model = net()
    optimizer = ctx.optimizer(torch.optim.LBFGS, model, lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = model(batch(1)).square().mean()
        ctx.backward(loss)
        return loss.detach()

    before = float(closure())
    for _ in range(3):
        optimizer.step(closure)
    assert float(closure()) < before / 10
    assert ctx.progress.step == 3


def test_zero_grad_without_accumulation_always_forgets(start):
    ctx = start()
    model = net()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    model(batch(0)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert model[0].weight.grad.abs().sum() == 0
    optimizer.zero_grad()
    assert model[0].weight.grad is None


def test_clipping_is_that_of_torch(start):
    ctx = start()
    model, reference = net(), net()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=1.0, clip_norm=0.01)
    for one in (model, reference):
        one(batch(0)).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    optimizer.step()
    assert optimizer.grad_norm == norm
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), reference.parameters(), strict=True))


def test_clipping_over_ranks(run_ranks):
    script = """
import torch, allranks
from torch import nn
torch.set_num_threads(1)
with allranks.init() as ctx:
    found = []
    for strategy in ("flat", "ddp", "fsdp"):
        torch.manual_seed(1)
        model = ctx.prepare(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), strategy=strategy)
        optimizer = ctx.optimizer(torch.optim.SGD, model, lr=1.0, clip_norm=0.1)
        model(torch.full((2, 4), ctx.rank + 1.0)).square().sum().backward()
        optimizer.step()
        norm = optimizer.grad_norm
        found.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
        total = sum((p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).square().sum()
                    for p in model.parameters()).sqrt().item()
        assert abs(total - 0.1) < 1e-5, total
    assert max(found) - min(found) < 1e-4 * max(found), found
    assert min(found) > 1
"""
    assert [(code, err) for code, _, err in run_ranks(script)] == [(0, "")] * 2


def test_an_attribute_of_the_scripts_own_model_is_not_taken_for_a_wrappers(start):
    ctx = start()
    model = net()
    model.all_used = True
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    ctx.backward(model[0](batch(0)).sum())
    optimizer.step()  # The last layer has no gradient.
    assert ctx.progress.step == 1


def test_a_second_step_over_ranks(run_ranks):
    script = """
import torch, allranks
from allranks import RankError
with allranks.init() as ctx:
    for strategy in ("flat", "ddp", "fsdp"):
        model = ctx.prepare(torch.nn.Linear(2, 1), strategy=strategy)
        optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        try:
            optimizer.step()
        except RankError as error:
            ctx.print(strategy, error.what)
"""
    said = "optimizer.step() without a backward pass since the last step"
    flat = "optimizer.step() with gradients that were not averaged over the ranks"
    assert run_ranks(script) == [(0, f"flat {flat}\nddp {said}\nfsdp {said}\n", ""), (0, "", "")]
