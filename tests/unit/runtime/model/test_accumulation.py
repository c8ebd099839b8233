"""``ctx.backward`` and ``ctx.accumulate``, with the optimizers that step after them."""

from __future__ import annotations

import pytest
import torch
from small_training import batch, net

from allranks.errors import RankError
from allranks.runtime.model.backward import weight
from allranks.runtime.progress import Progress


@pytest.mark.parametrize("order", ["before", "after"])
def test_zero_grad_before_or_after_with_accumulation(start, order):
    ctx = start()
    model, reference = net(), net()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    done = []
    for number in range(4):
        if order == "before":
            optimizer.zero_grad()
        with ctx.accumulate(model, steps=2):
            ctx.backward(model(batch(number)).square().mean())
        optimizer.step()
        done.append(ctx.progress.stepped)
        if order == "after":
            optimizer.zero_grad()
        if number % 2:
            theirs.zero_grad()
            reference(torch.cat([batch(number - 1), batch(number)])).square().mean().backward()
            theirs.step()
    assert done == [False, True, False, True]
    assert (ctx.progress.step, ctx.progress.weighed) == (2, 2)
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


def test_plain_backward_where_it_would_be_wrong(start):
    ctx = start()
    model = net()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    model(batch(0)).sum().backward()
    optimizer.step()  # Here it is right.
    for _ in range(2):
        with ctx.accumulate(model, steps=2):
            model(batch(0)).sum().backward()
    with pytest.raises(RankError, match="gradients of 2 micro-batches are added up"):
        optimizer.step()


def test_plain_backward_with_an_uneven_batch_or_fp16(start):
    ctx = start(precision="fp16")
    model = net()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    model(batch(0)).sum().backward()
    with pytest.raises(RankError, match="with fp16 the loss has to be scaled"):
        optimizer.step()
    ctx.close()
    ctx = start()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    ctx.progress.samples, ctx.progress.total = 3, 8
    with pytest.raises(RankError, match="this rank has 3 of 8 samples"):
        optimizer.step()


def test_accumulate_needs_a_number_and_is_one_object(start):
    ctx = start()
    model = net()
    assert ctx.accumulate(model, 2) is ctx.accumulate(model, 2)
    for steps in (0, -1, 1.5):
        with pytest.raises(RankError, match="steps="):
            ctx.accumulate(model, steps)


def test_two_models_may_accumulate_side_by_side(start):
    ctx = start()
    first, second = net(), net()
    turns = []
    for _ in range(4):
        for model in (first, second):
            with ctx.accumulate(model, steps=2):
                turns.append((ctx.progress.micro, ctx.progress.is_boundary))
    assert turns == [(0, False)] * 2 + [(1, True)] * 2 + [(0, False)] * 2 + [(1, True)] * 2


def test_an_epoch_ends_an_effective_batch(start):
    ctx = start()
    model = net()
    sizes = []
    for left in (4, 3, 2, 1, 0, 4, 3):
        ctx.progress.left = left
        with ctx.accumulate(model, steps=3):
            sizes.append((ctx.progress.accumulation, ctx.progress.is_boundary))
    assert sizes == [(3, False), (3, False), (3, True), (2, False), (2, True), (3, False), (3, False)]


@pytest.mark.parametrize(
    ("progress", "world_size", "expected"),
    [
        (Progress(), 4, 1.0),
        (Progress(accumulation=4), 4, 0.25),
        (Progress(samples=8, total=32, full=32, last=32, left=3), 4, 1.0),
        (Progress(samples=3, total=7, full=8, last=7, left=0), 2, 6 / 7),
        (Progress(samples=0, total=7, full=8, last=7, left=0), 2, 0.0),
        (Progress(samples=4, total=8, full=8, last=7, left=1, accumulation=2, micro=0), 2, 8 / 15),
        (Progress(samples=3, total=7, full=8, last=7, left=0, accumulation=2, micro=1), 2, 6 / 15),
        (Progress(samples=4, total=8, full=8, last=7, left=2, accumulation=2, micro=0), 2, 0.5),
        (Progress(samples=4, total=8, full=8, accumulation=2), 2, 0.5),
    ],
)
def test_weight_of_a_micro_batch(progress, world_size, expected):
    assert weight(progress, world_size) == expected


def test_a_batch_after_accumulation_counts_in_full(start):
    ctx = start()
    model, reference = net(), net()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    for number in range(2):
        with ctx.accumulate(model, steps=2):
            ctx.backward(model(batch(number)).sum())
        optimizer.step()
    optimizer.zero_grad()
    reference.load_state_dict(model.state_dict())
    ctx.backward(model(batch(2)).sum())
    reference(batch(2)).sum().backward()
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, expected.grad)


def test_another_model_steps_between_the_micro_batches_of_one(start):
    ctx = start()
    one, other = net(), net()
    optimizers = [ctx.optimizer(torch.optim.SGD, model, lr=0.1) for model in (one, other)]
    done = []
    for number in range(4):
        with ctx.accumulate(one, steps=2):
            ctx.backward(one(batch(number)).sum())
        ctx.backward(other(batch(number)).sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            done.append(ctx.progress.stepped)
    assert done == [False, True, True, True] * 2


def test_a_stream_that_ends_within_an_effective_batch_gives_the_mean_over_its_samples(start):
    ctx = start()
    model, reference = net(), net()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.0)
    progress = ctx.progress
    progress.full = 4
    for number, size in enumerate((4, 4, 2)):
        progress.samples = progress.total = size
        progress.left = 0 if number == 2 else None
        with ctx.accumulate(model, steps=8):
            ctx.backward(model(batch(number, size)).square().mean())
        optimizer.step()
    assert (progress.step, progress.accumulation) == (1, 3)
    everything = torch.cat([batch(0), batch(1), batch(2, 2)])
    reference(everything).square().mean().backward()
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)


def test_an_optimizer_of_torch_may_step_after_the_last_micro_batch_only(start):
    ctx = start()
    model, other = net(), net()
    plain, elsewhere = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    with ctx.accumulate(model, steps=2):
        ctx.backward(model(batch(0)).sum())
    elsewhere.step()
    with pytest.raises(RankError, match=r"between the micro-batches(.|\n)*ctx.optimizer\(torch.optim.SGD"):
        plain.step()
    with ctx.accumulate(model, steps=2):
        ctx.backward(model(batch(0)).sum())
    plain.step()
    with ctx.accumulate(model, steps=2):
        ctx.backward(model(batch(0)).sum())
    ctx.close()
    plain.step()


def test_the_effective_batch_is_told_once(start, capsys):
    ctx = start()
    model = net()
    ctx.progress.full = 256
    for steps in (1, 4, 4, 2):
        with ctx.accumulate(model, steps=steps):
            pass
    assert capsys.readouterr().out == "effective batch: 1024 samples a step (4 micro-batches of 256)\n"


def test_a_plain_backward_pass_is_refused_in_the_first_step_of_an_epoch_that_ends_uneven(run_ranks):
    script = """
import torch, allranks
from allranks import RankError
with allranks.init() as ctx:
    model = ctx.prepare(torch.nn.Linear(2, 1))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    ctx.progress.samples, ctx.progress.total, ctx.progress.full, ctx.progress.last = 4, 8, 8, 7
    model(torch.ones(4, 2)).mean().backward()
    try:
        optimizer.step()
    except RankError as error:
        ctx.print(error.why, error.fix)
"""
    assert run_ranks(script)[0] == (
        0,
        "the last batch of the epoch has 7 samples for 2 ranks, no even shares "
        "ctx.backward(loss), not loss.backward(), or ctx.loader(..., drop_last=True)\n",
        "",
    )
