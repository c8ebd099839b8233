"""The one step that ``allranks estimate`` measures, against what the same training uses and sends."""

from __future__ import annotations

from pathlib import Path

from allranks.record.estimate import MeasuredStep, read_step

#: A model of 9610 parameters: 64 x 128 + 128 and 128 x 10 + 10. Its batch of 128 is that of all ranks.
TRAINING = """\
import os
import torch
from torch import nn
import allranks

class Layer(nn.Linear):
    pass

def train(strategy="auto", global_batch_size=128, **found):
    with allranks.init(precision=found.get("precision", "fp32"), trackers=found.get("trackers", ())) as ctx:
        data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))
        net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), Layer(128, 10))
        model = ctx.prepare(net, strategy=strategy, shard=[Layer])
        optimizer = ctx.optimizer(torch.optim.Adam, model, lr=1e-3)
        loader = ctx.loader(data, global_batch_size=global_batch_size)
        ctx.checkpoints("kept", every=1, model=model, optimizer=optimizer)
        with torch.no_grad():
            model(torch.randn(100_000, 64))  # An evaluation is no part of the step.
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            ctx.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            ctx.metrics.log(loss=loss)
            yield model
"""
MEASURED = """
os.environ["_ALLRANKS_ESTIMATE"] = sys.argv[1]
for _ in train({arguments}):
    print("it went on")
"""
#: Peak of torch's CPU allocator in the third step of one rank, beside the parameters and Adam's state.
REAL = """
from torch.profiler import ProfilerActivity, profile

steps, profiler = train(global_batch_size=32), profile(activities=[ProfilerActivity.CPU], profile_memory=True)
next(steps), next(steps)
with profiler:
    next(steps)
now = peak = 0
for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
    if event.name() == "[memory]":
        now += event.nbytes()
        peak = max(peak, now)
print(peak)
os._exit(0)
"""
#: The bytes that DDP gives to its hook in the third step, and those of the messages of a flat model.
SENT = """
from torch import distributed
from allranks.runtime.model.allreduce import Message

sizes = {"ddp": 0, "flat": 0}

def count(_, bucket):
    sizes["ddp"] += bucket.buffer().numel() * bucket.buffer().element_size()
    return distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

def send(self):
    sizes["flat"] += self._sent.numel() * self._sent.element_size()
    message_send(self)

message_send, Message.send = Message.send, send
for strategy in sizes:
    steps = train(strategy)
    model = next(steps)
    if strategy == "ddp":
        model.register_comm_hook(None, count)
    sizes[strategy] = 0
    next(steps)
    steps.close()
if os.environ["RANK"] == "0":
    print(sizes["ddp"], sizes["flat"])
"""


def measure(run_python, folder: Path, env: dict[str, str], arguments: str = "", ranks: int = 4) -> MeasuredStep:
    file = folder / "step.json"
    script = f"import sys\n{TRAINING}{MEASURED.format(arguments=arguments)}"
    done = run_python(script, f"{ranks}:{file}", env=env, cwd=folder)
    assert (done.rc, done.stderr) == (0, "")
    assert "it went on" not in done.stdout
    found = read_step(file)
    assert found is not None
    return found


def test_sizes_of_one_step_are_exact_and_nothing_is_left(run_python, clean_env, tmp_path):
    found = measure(run_python, tmp_path, clean_env, "trackers=['tensorboard']")
    assert (found.count, found.parameters, found.gradients, found.sent) == (9610, 38440, 38440, 38440)
    assert found.optimizers == ("Adam",)
    assert found.optimizer_state == 2 * 38440 + 4 * 4  # And the number of steps, of each of four tensors.
    assert (found.units, found.root) == ((4 * (128 * 10 + 10),), 4 * (64 * 128 + 128))
    assert found.checkpoint == found.parameters + found.optimizer_state
    assert (found.batch, found.global_batch, found.accumulation, found.strategy) == (32, 128, 1, "auto")
    assert {path.name for path in tmp_path.iterdir()} == {"step.json", "checkpoints"}  # Which is beside the file.
    assert not any((tmp_path / "checkpoints").rglob("*.safetensors"))


def test_activations_are_those_of_the_real_training(run_python, clean_env, tmp_path):
    found = measure(run_python, tmp_path, clean_env)
    done = run_python(TRAINING + REAL, env=clean_env, cwd=tmp_path)
    assert found.activations is not None
    peak = int(done.stdout.splitlines()[-1])
    assert 0.85 * peak <= found.activations <= 1.15 * peak


def test_ranks_send_as_many_bytes_as_estimated(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = run_ranks(TRAINING + SENT)
    assert [code for code, _, _ in results] == [0, 0], results
    assert results[0][1].splitlines()[-1] == "38440 38440"
