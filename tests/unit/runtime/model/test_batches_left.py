"""An effective batch that was left before it was full goes into no later step."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from allranks.errors import RankError


@pytest.fixture
def ctx(start):
    """Give a context in a world of one."""
    return start(seed=1)


def net():
    torch.manual_seed(3)
    return nn.Linear(4, 1)


def batch(seed, n=2):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))


def micro(ctx, model, optimizer, inputs, steps):
    """Work on a micro-batch as a script does; tell whether it was the last."""
    with ctx.accumulate(model, steps=steps):
        ctx.backward(model(inputs).square().mean())
    optimizer.step()
    return ctx.progress.stepped


def gradients_are_of(model, inputs):
    reference = net()
    reference(inputs).square().mean().backward()
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)


@pytest.mark.parametrize("listed", [False, True], ids=["model", "parameters"])
def test_another_number_of_micro_batches_begins_anew(ctx, listed):
    model = net()
    optimizer = ctx.optimizer(torch.optim.SGD, list(model.parameters()) if listed else model, lr=0.0)
    assert not micro(ctx, model, optimizer, batch(0), 4)
    assert [micro(ctx, model, optimizer, batch(number), 2) for number in (1, 2)] == [False, True]
    gradients_are_of(model, torch.cat([batch(1), batch(2)]))
    optimizer.zero_grad()
    assert not micro(ctx, model, optimizer, batch(3), 4)
    assert ctx.progress.micro == 0


@pytest.mark.parametrize("plain", [False, True])
def test_a_step_with_gradients_of_both_is_refused(ctx, plain):
    model = net()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    micro(ctx, model, optimizer, batch(0), 4)
    loss = model(batch(1)).mean()
    loss.backward() if plain else ctx.backward(loss)
    with pytest.raises(RankError, match=r"effective batch that was left after micro-batch 1 of 4(.|\n)*steps=1\)"):
        optimizer.step()
    assert ctx.progress.step == 0
    assert micro(ctx, model, optimizer, batch(2), 1)
    assert ctx.progress.step == 1


def test_zero_grad_forgets_one_that_is_full_and_was_not_taken_for_a_step(ctx):
    model = net()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.0)
    for number in range(2):  # As with a step that is left out since the loss is not finite.
        optimizer.zero_grad()
        with ctx.accumulate(model, steps=2):
            optimizer.zero_grad()
            ctx.backward(model(batch(number)).square().mean())
    gradients_are_of(model, torch.cat([batch(0), batch(1)]))
    for number in range(2, 4):
        optimizer.zero_grad()
        micro(ctx, model, optimizer, batch(number), 2)
    gradients_are_of(model, torch.cat([batch(2), batch(3)]))


def test_zero_grad_keeps_what_another_optimizer_of_parameters_adds_up(ctx):
    """The effective batch of one model is full while that of the other is not."""
    models = net(), net()
    optimizers = [ctx.optimizer(torch.optim.SGD, list(model.parameters()), lr=0.0) for model in models]
    micro(ctx, models[0], optimizers[0], batch(0), 2)
    micro(ctx, models[1], optimizers[1], batch(0), 2)
    micro(ctx, models[0], optimizers[0], batch(1), 2)
    optimizers[1].zero_grad()
    assert micro(ctx, models[1], optimizers[1], batch(1), 2)
    gradients_are_of(models[1], torch.cat([batch(0), batch(1)]))


@pytest.fixture
def training(ctx, tmp_path):
    """Give model, optimizer and loader, of ten batches of two, and checkpoints."""
    model = net()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.0)
    loader = ctx.loader(TensorDataset(batch(9, 20)), batch_size=2, quiet=True)
    checkpoints = ctx.checkpoints(tmp_path, every=1, model=model, optimizer=optimizer, loader=loader, background=False)
    return model, optimizer, loader, checkpoints


def test_the_next_epoch_begins_anew(ctx, training):
    model, optimizer, loader, checkpoints = training
    seen, steps = [], []
    for epoch in loader.epochs(2):
        for number, (inputs,) in enumerate(loader):
            steps.append(micro(ctx, model, optimizer, inputs, 4))
            seen.append(inputs)
            checkpoints.step()
            if number == (5 if epoch == 0 else 3):
                break
            optimizer.zero_grad()
        if epoch == 0:
            with pytest.raises(RankError, match="within an effective batch, after micro-batch 2 of 4"):
                checkpoints.save()
    assert steps == [False, False, False, True, False, False, False, False, False, True]
    gradients_are_of(model, torch.cat(seen[-4:]))
    assert (loader.epoch, loader.state_dict()["position"]) == (2, 0)


def test_another_loop_in_the_same_epoch_goes_on(ctx, training):
    model, optimizer, loader, _ = training
    seen, steps = [], []
    for _ in loader.epochs(1):
        for _ in range(2):
            for number, (inputs,) in enumerate(loader):
                steps.append(micro(ctx, model, optimizer, inputs, 4))
                seen.append(inputs)
                if number == 1:
                    break
    assert steps == [False, False, False, True]
    gradients_are_of(model, torch.cat(seen))


def test_a_state_that_is_loaded_begins_anew(ctx, training):
    model, optimizer, loader, checkpoints = training
    before = loader.state_dict()
    next(iter(loader))
    micro(ctx, model, optimizer, batch(0), 2)
    loader.load_state_dict(before)
    assert model.weight.grad is None
    checkpoints.save()  # Nothing is added up.
    assert [micro(ctx, model, optimizer, inputs, 2) for (inputs,), _ in zip(loader, range(2), strict=False)] == [
        False,
        True,
    ]


OVER_RANKS = """
import json, torch, allranks
from torch import nn
torch.set_num_threads(1)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
    def forward(self, x):
        return torch.tanh(self.layer(x))
def net():
    torch.manual_seed(5)
    return nn.Sequential(Block(), nn.Linear(6, 2))
def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
def loss_of(model, x):
    return model(x).float().square().mean()
with allranks.init(precision={precision!r}) as ctx:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(9))
    model, reference = ctx.prepare(net(), strategy={strategy!r}, shard=[Block]), net()
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.0)
    progress = ctx.progress
    {train}
    loss_of(reference, wanted).backward()
    ctx.print(json.dumps(max((full(a.grad) - b.grad).abs().max().item() / b.grad.abs().max().item()
                             for a, b in zip(model.parameters(), reference.parameters(), strict=True))))
"""
#: One of four, and then two of two.
LEFT = """
    for number, steps in enumerate((4, 2, 2)):
        at = number * 4 + ctx.rank * 2
        with ctx.accumulate(model, steps=steps), ctx.autocast():
            loss = loss_of(model, x[at : at + 2])
            ctx.backward(loss)
        optimizer.step()
    assert progress.step == 1
    wanted = x[4:]
"""
#: A stream, whose end shows with its last batch: 4, 4 and 2 samples, where 8 batches were to come.
CUT_SHORT = """
    progress.full = 4
    for number, size in enumerate((4, 4, 2)):
        progress.samples, progress.total, progress.left = size // 2, size, 0 if size == 2 else None
        at = number * 4 + ctx.rank * (size // 2)
        with ctx.accumulate(model, steps=8), ctx.autocast():
            loss = loss_of(model, x[at : at + size // 2])
            ctx.backward(loss)
        optimizer.step()
    assert progress.step == 1
    wanted = x[:10]
"""


@pytest.mark.parametrize("train", [LEFT, CUT_SHORT], ids=["left", "cut short"])
@pytest.mark.parametrize(
    ("strategy", "precision"), [("flat", "fp32"), ("ddp", "fp32"), ("fsdp", "fp32"), ("fsdp", "bf16")]
)
def test_over_ranks_the_step_takes_the_mean_over_its_own_samples(run_ranks, strategy, precision, train):
    (code, out, err), (other, _, _) = run_ranks(
        OVER_RANKS.format(strategy=strategy, precision=precision, train=train.strip())
    )
    assert (code, other) == (0, 0), err
    assert json.loads(out.splitlines()[-1]) < (1e-5 if precision == "fp32" else 0.03)
