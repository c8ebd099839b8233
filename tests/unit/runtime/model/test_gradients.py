"""Averaged gradients on real ranks equal those of one process that sees all samples."""

from __future__ import annotations

import json

import pytest

HEAD = """
import json, os, sys
import torch
from torch import nn
import allranks
from allranks.runtime.model import allreduce
from allranks.errors import RankError

torch.set_num_threads(1)
allreduce.LEAST = int(os.environ["LEAST"])  # From how many bytes on gradients go through shared memory.

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 450), nn.Tanh())  # One is large.
        self.head = nn.Linear(450, 3)
    def forward(self, x):
        return {"out": (self.head(self.body(x)),)}

def net():
    torch.manual_seed(5)
    return Net().double()

def data(n):
    g = torch.Generator().manual_seed(9)
    return torch.randn(n, 6, generator=g, dtype=torch.float64), torch.randint(0, 3, (n,), generator=g)

def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x)["out"][0], y)

def whole(n):
    model = net()
    x, y = data(n)
    loss_of(model, x, y).backward()
    return {name: p.grad for name, p in model.named_parameters()}

def worst(model, expected):
    from allranks.runtime.model.flat_gradients import unwrap
    full = lambda grad: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return max((full(p.grad) - expected[name]).abs().max().item() for name, p in unwrap(model).named_parameters())

def tell(**facts):
    sys.stdout.write(json.dumps(facts) + "\\n")
"""


#: Gradients go through shared memory in "auto" and through gloo in "flat".
LEAST = {"auto": "0", "flat": str(1 << 40), "ddp": "0", "fsdp": "0"}


@pytest.fixture
def run_ranks(run_ranks):
    """Give what runs a script on ranks; gradients go through shared memory unless it is told otherwise."""

    def run(script, world_size=2, LEAST="0"):  # noqa: N803 - a variable of the environment
        return run_ranks(script, world_size, LEAST=LEAST)

    return run


@pytest.mark.parametrize("strategy", ["auto", "flat", "ddp"])
def test_plain_backward_averages(facts_of, strategy):
    script = f"""{HEAD}
with allranks.init() as ctx:
    module = net()
    if ctx.rank:
        with torch.no_grad():
            for p in module.parameters():
                p.add_(1)  # Prepared models start from the weights of rank 0.
    model = ctx.prepare(module, strategy={strategy!r})
    x, y = data(6)
    mine = slice(ctx.rank * 3, ctx.rank * 3 + 3)
    loss_of(model, x[mine], y[mine]).backward()
    tell(worst=worst(model, whole(6)), kind=type(model).__name__, keys=[*model.state_dict()][0])
"""
    kind = {"auto": "Flat", "flat": "Flat", "ddp": "Buckets"}[strategy]
    for facts in facts_of(script, LEAST=LEAST[strategy]):
        assert (facts["kind"], facts["keys"]) == (kind, "module.body.0.weight")
        assert facts["worst"] < 1e-15


@pytest.mark.parametrize("strategy", ["auto", "flat", "ddp", "fsdp"])
def test_accumulation_over_uneven_batches_is_the_mean_over_all_samples(facts_of, strategy):
    """Three micro-batches of 4, 4 and 3 samples on two ranks; the last one gives rank 1 only one."""
    script = f"""{HEAD}
with allranks.init() as ctx:
    model = ctx.prepare(net(), strategy={strategy!r})
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.0)
    x, y = data(11)
    progress, done = ctx.progress, []
    progress.full, progress.last = 4, 3
    for number, (start, sizes) in enumerate([(0, (2, 2)), (4, (2, 2)), (8, (2, 1))]):
        progress.samples, progress.total, progress.left = sizes[ctx.rank], sum(sizes), 2 - number
        at = start + sum(sizes[: ctx.rank])
        mine = slice(at, at + sizes[ctx.rank])
        with ctx.accumulate(model, steps=8):
            ctx.backward(loss_of(model, x[mine], y[mine]))
        optimizer.step()
        done.append(progress.stepped)
    tell(worst=worst(model, whole(11)), done=done, step=progress.step, size=progress.accumulation)
"""
    for facts in facts_of(script, LEAST=LEAST[strategy]):
        assert (facts["done"], facts["step"], facts["size"]) == ([False, False, True], 1, 3)
        assert facts["worst"] < 1e-15


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp"])
def test_a_rank_without_samples_counts_nothing(facts_of, strategy):
    script = f"""{HEAD}
with allranks.init() as ctx:
    model = ctx.prepare(net(), strategy={strategy!r})
    x, y = data(2)
    ctx.progress.samples, ctx.progress.total = (2, 2) if ctx.rank == 0 else (0, 2)
    ctx.backward(loss_of(model, x, y))
    tell(worst=worst(model, whole(2)))
"""
    for facts in facts_of(script):
        assert facts["worst"] < 1e-15


@pytest.mark.parametrize("strategy", ["flat", "ddp"])
def test_no_message_before_the_last_micro_batch(facts_of, strategy):
    script = f"""{HEAD}
with allranks.init() as ctx:
    model = ctx.prepare(net(), strategy={strategy!r})
    x, y = data(2)
    grads = []
    for _ in range(2):
        with ctx.accumulate(model, steps=2):
            ctx.backward(loss_of(model, x[ctx.rank : ctx.rank + 1], y[ctx.rank : ctx.rank + 1]))
        grads.append(next(iter(model.parameters())).grad.sum().item())
    tell(grads=grads)
"""
    first, second = facts_of(script)
    assert first["grads"][0] != second["grads"][0]
    assert first["grads"][1] == second["grads"][1]


def test_two_forward_passes_before_a_backward_and_two_backward_passes_before_a_step(facts_of):
    script = f"""{HEAD}
with allranks.init() as ctx:
    model = ctx.prepare(net(), strategy="flat")
    x, y = data(8)
    a, b = slice(ctx.rank * 2, ctx.rank * 2 + 2), slice(4 + ctx.rank * 2, 6 + ctx.rank * 2)
    ((loss_of(model, x[a], y[a]) + loss_of(model, x[b], y[b])) / 2).backward()
    once = worst(model, whole(8))
    model.zero_grad()
    (loss_of(model, x[a], y[a]) / 2).backward()
    (loss_of(model, x[b], y[b]) / 2).backward()
    tell(worst=max(once, worst(model, whole(8))))
"""
    for facts in facts_of(script):
        assert facts["worst"] < 1e-15


@pytest.mark.parametrize("least", ["0", LEAST["flat"]])
def test_three_ranks_give_the_same_bits_also_after_a_new_start(run_ranks, least):
    """The second run starts where the first was after two steps, as a continued run does."""
    script = f"""{HEAD}
import hashlib, pathlib
def train(ctx, model, optimizer, steps):
    for step in steps:
        g = torch.Generator().manual_seed(1000 * step + ctx.rank)
        x, y = torch.randn(4, 6, generator=g), torch.randint(0, 3, (4,), generator=g)
        optimizer.zero_grad()
        ctx.backward(loss_of(model, x, y))
        optimizer.step()
def digest(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
def fresh(ctx, strategy):
    model = ctx.prepare(net().float(), strategy=strategy)
    return model, ctx.optimizer(torch.optim.AdamW, model, lr=0.01, clip_norm=0.5)
with allranks.init() as ctx:
    object.__setattr__(ctx, "deterministic", True)
    found = []
    for strategy in ("flat", "ddp"):
        model, optimizer = fresh(ctx, strategy)
        train(ctx, model, optimizer, range(2))
        saved = [{{k: v.clone() for k, v in model.state_dict().items()}}, optimizer.state_dict()]
        import copy
        saved = copy.deepcopy(saved)
        train(ctx, model, optimizer, range(2, 5))
        again, optimizer = fresh(ctx, strategy)
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(ctx, again, optimizer, range(2, 5))
        found.append([digest(model), digest(again)])
    tell(found=found)
"""
    results = run_ranks(script, 3, least)
    # torch's DDP remarks on stderr that it looked for unused parameters and found none.
    assert [code for code, _, _ in results] == [0, 0, 0], results
    everyone = [json.loads(out) for _, out, _ in results]
    for one, again in everyone[0]["found"]:
        assert one == again
    assert everyone[0] == everyone[1] == everyone[2]


def test_compressed_gradients_are_rounded_and_no_more(facts_of):
    script = f"""{HEAD}
with allranks.init() as ctx:
    x, y = data(6)
    mine = slice(ctx.rank * 3, ctx.rank * 3 + 3)
    expected = {{name: grad.float() for name, grad in whole(6).items()}}
    scale = max(grad.abs().max().item() for grad in expected.values())
    found = {{}}
    for strategy in ("flat", "ddp"):
        for compress in ("bf16", "fp16"):
            model = ctx.prepare(net().float(), strategy=strategy, compress=compress)
            loss_of(model, x[mine].float(), y[mine]).backward()
            found[strategy + compress] = worst(model, expected) / scale
    tell(**found)
"""
    for facts in facts_of(script):
        for name, error in facts.items():
            assert 1e-7 < error < (2**-7 if "bf16" in name else 2**-10), name


def test_a_model_called_past_its_wrapper_is_an_error(facts_of):
    script = f"""{HEAD}
with allranks.init() as ctx:
    model = ctx.prepare(net())
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    loss_of(model.module, *data(2)).backward()
    try:
        optimizer.step()
    except RankError as error:
        tell(error=str(error))
"""
    for facts in facts_of(script):
        assert facts["error"].startswith("optimizer.step() with gradients that were not averaged over the ranks")


def test_gradients_for_somebody_else_send_nothing(facts_of):
    """Only rank 0 asks for gradients of its input: a message would find nobody."""
    script = f"""{HEAD}
with allranks.init() as ctx:
    model = ctx.prepare(net())
    if ctx.is_main:
        x, y = data(2)
        x.requires_grad_()
        torch.autograd.grad(loss_of(model, x, y), x)
    ctx.barrier()
    loss_of(model, *data(2)).backward()
    tell(worst=worst(model, whole(2)))
"""
    for facts in facts_of(script):
        assert facts["worst"] < 1e-15


def test_a_large_gradient_that_one_rank_lacks(facts_of):
    """The second layer is sent by itself; rank 1 leaves it out, and both send in the same order."""
    script = f"""{HEAD}
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(400, 400, bias=False) for _ in range(3))
    def forward(self, x, both):
        return self.second(self.first(x)) if both else self.first(x)
with allranks.init() as ctx:
    model = ctx.prepare(Branches(), strategy="flat", find_unused_parameters=True)
    found = []
    for both in (ctx.is_main, True):
        model(torch.ones(1, 400), both).sum().backward()
        inner = model.module
        grads = [inner.first.weight.grad, inner.second.weight.grad]
        found.append([[grad.double().sum().item() for grad in grads], inner.never.weight.grad is None])
        model.zero_grad()
    expected = inner.first(torch.ones(1, 400)).double().sum().item() * 400
    tell(found=found, expected=expected)
"""
    first, second = facts_of(script)
    assert first["found"] == second["found"]
    (once, never), (twice, never_again) = first["found"]
    assert (never, never_again) == (True, True)
    assert once[1] == pytest.approx(first["expected"] / 2, rel=1e-3, abs=1e-2)
    assert twice[1] == pytest.approx(first["expected"], rel=1e-3, abs=1e-2)


def test_ranks_that_cannot_share_memory_take_gloo(facts_of):
    script = f"""{HEAD}
def refuse(name):
    raise OSError(24, "Too many open files")
with allranks.init() as ctx:
    if ctx.rank:
        os.memfd_create = refuse
    model = ctx.prepare(net())
    x, y = data(6)
    mine = slice(ctx.rank * 3, ctx.rank * 3 + 3)
    loss_of(model, x[mine], y[mine]).backward()
    tell(worst=worst(model, whole(6)), buffer=type(model._late[0]).__name__)
"""
    for facts in facts_of(script):
        assert facts["buffer"] == "Message"
        assert facts["worst"] < 1e-15


@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_is_shared_step_after_step(facts_of, world_size):
    """Nobody overwrites what another rank still reads, whichever rank is late, and what is done to gradients is own."""
    script = f"""{HEAD}
import random, time
with allranks.init() as ctx:
    model = ctx.prepare(nn.Linear(7, 5, bias=False).double())
    delays, worst = random.Random(ctx.rank), 0.0
    for step in range(60):
        time.sleep(delays.choice([0, 0, 0.002]))  # Another rank is late each time.
        x = torch.full((1, 7), float(step * ctx.world_size + ctx.rank), dtype=torch.float64)
        model(x).sum().backward()
        time.sleep(delays.choice([0, 0, 0.002]))
        expected = step * ctx.world_size + (ctx.world_size - 1) / 2
        grad = model.module.weight.grad
        worst = max(worst, (grad - expected).abs().max().item())
        grad.mul_(ctx.rank + 2)
        model.module.weight.grad = None
    tell(worst=worst, buffer=type(model._late[0]).__name__)
"""
    for facts in facts_of(script, world_size):
        assert facts["buffer"] == "SharedMessage"
        assert facts["worst"] < 1e-12
