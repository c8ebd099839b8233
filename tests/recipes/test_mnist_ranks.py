"""The MNIST recipe through allranks, and that its ranks share the work as they should."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

RECIPE = Path(__file__).parents[2] / "recipes" / "mnist"
EPOCH = re.compile(r"^\[0\] Epoch (\d+) - Avg Loss: (\d+\.\d{4}), Accuracy: (\d+\.\d{2})%$", re.MULTILINE)


def test_the_job_file_reaches_97_percent_with_two_ranks(allranks, assert_nothing_left):
    done = allranks("run", RECIPE / "job.yaml", "--nproc-per-node", "2", timeout=150, CUDA_VISIBLE_DEVICES="")
    assert done.rc == 0, done.stderr
    assert "[0] Processes: 2 on cpu (gloo), master node: 127.0.0.1\n" in done.stdout
    epochs = EPOCH.findall(done.stdout)
    assert [int(epoch) for epoch, _, _ in epochs] == list(range(1, 9))
    assert float(epochs[-1][1]) < float(epochs[0][1])
    assert float(epochs[-1][2]) >= 97
    assert "[1] " not in done.stdout  # Rank 0 speaks for all.
    checkpoint = allranks.run() / "checkpoints" / "checkpoint.pt"
    assert f"[0] Trained for 8 epochs; the checkpoint is {checkpoint}\n" in done.stdout
    assert torch.load(checkpoint, weights_only=True)["epoch"] == 8
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]
    assert_nothing_left(allranks.run(), 0.5)


WRITERS = """
import os, runpy, sys
script, folder = sys.argv[1:3]
del sys.argv[1:3]

def note(event, args):
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    if (writes or event in ("os.rename", "os.mkdir")) and str(args[0]).startswith(folder):
        os.write(1, f"{os.environ['RANK']} {event} {os.path.basename(args[0])}\\n".encode())

sys.addaudithook(note)
runpy.run_path(script, run_name="__main__")
"""


def run_recipe(allranks, text, *args):
    """Run a script that uses the recipe on two ranks; give the lines that each rank has printed."""
    script = allranks.script(f"import sys\nsys.path.insert(0, {str(RECIPE)!r})\n{text}")
    done = allranks("run", script, "--nproc-per-node", "2", "--", *args, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert done.rc == 0, done.stderr
    node = allranks.run() / "attempts" / "000" / "node-000"
    return [(node / f"rank-{rank}.out").read_text().splitlines() for rank in (0, 1)]


def test_only_rank_0_touches_the_checkpoints(allranks):
    folder = allranks.folder / "checkpoints"
    own = ["--epochs", "2", "--checkpoint-dir", folder]
    first, second = run_recipe(allranks, WRITERS, RECIPE / "train.py", folder, *own)
    touched = [line for line in first if line.startswith("0 o")]
    assert touched == ["0 os.mkdir checkpoints", "0 open checkpoint.tmp", "0 os.rename checkpoint.tmp"] * 2
    assert second == []


#: Rank 0 has three samples and rank 1 has one. With a mean of means, or only its own samples, a rank is wrong.
SHARES = """
import json, train, allranks, torch
from torch.utils.data import DataLoader, TensorDataset

images = torch.tensor(json.loads(sys.argv[1]))
labels = torch.arange(len(images))
with allranks.init() as ctx:
    mine = slice(0, 3) if ctx.rank == 0 else slice(3, 4)
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight.data = torch.eye(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(images[mine], labels[mine]), batch_size=2)
    loss = train.train(ctx, model, optimizer, loader)
    three = train.evaluate(ctx, model, TensorDataset(images[:3], labels[:3]))
    print(json.dumps([loss, three]))
"""


def test_metrics_are_those_of_all_samples_on_all_ranks(allranks):
    # The answers to samples 0 and 2, which are rank 0's when it is asked for three, are right; to 1 it is wrong.
    answers = [[4.0, 0, 0, 0], [3.0, 0, 0, 0], [0, 0, 2.0, 0], [1.0, 0, 0, 0]]
    printed = run_recipe(allranks, SHARES, json.dumps(answers))
    loss = functional.cross_entropy(torch.tensor(answers), torch.arange(4)).item()
    for (line,) in printed:
        assert json.loads(line) == [pytest.approx(loss, rel=1e-6), pytest.approx(2 / 3)]


def test_each_held_out_sample_is_counted_once(monkeypatch):
    """Every rank evaluates what the others do not, also where the ranks do not divide the samples."""
    monkeypatch.syspath_prepend(str(RECIPE))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    import train

    seen = []

    class Rank:
        device = torch.device("cpu")
        world_size = 3

        def __init__(self, rank):
            self.rank = rank

        def sum(self, *values):
            return values

    class Model(torch.nn.Module):
        def forward(self, images):
            seen.extend(images.flatten().tolist())
            return functional.one_hot(images.flatten().long(), 7)

    data = torch.utils.data.TensorDataset(torch.arange(7.0).unsqueeze(1), torch.arange(7))
    assert [train.evaluate(Rank(rank), Model(), data) for rank in range(3)] == [1.0] * 3
    assert sorted(seen) == list(range(7))
