"""The MNIST recipe through allranks, and that its ranks share the work as they should."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mnist_files import write_mnist

RECIPE = Path(__file__).parents[2] / "recipes" / "mnist"
EPOCH = re.compile(r"^\[0\] Epoch (\d+) - Avg Loss: (\d+\.\d{4}), Accuracy: (\d+\.\d{2})%$", re.MULTILINE)


@pytest.mark.smoke
def test_the_job_file_reaches_97_percent_with_two_ranks(allranks, assert_nothing_left):
    """It takes more than 10 s: it is a whole training."""
    done = allranks("run", RECIPE / "job.yaml", "--nproc-per-node", "2", timeout=150, CUDA_VISIBLE_DEVICES="")
    assert done.rc == 0, done.stderr
    assert "[0] Processes: 2 on cpu (gloo), master node: 127.0.0.1\n" in done.stdout
    epochs = EPOCH.findall(done.stdout)
    assert [int(epoch) for epoch, _, _ in epochs] == list(range(1, 9))
    assert float(epochs[-1][1]) < float(epochs[0][1])
    assert float(epochs[-1][2]) >= 97
    assert "[1] " not in done.stdout  # Rank 0 speaks for all.
    checkpoints = allranks.run() / "checkpoints"
    assert f"[0] Trained for 8 epochs; the checkpoints are in {checkpoints}\n" in done.stdout
    listed = allranks("checkpoint", "ls", checkpoints, "--json").stdout
    steps = [(entry["step"], entry["epoch"], entry["problem"]) for entry in json.loads(listed)]
    assert steps == [(138, 6, None), (161, 7, None), (184, 8, None)]
    records = [json.loads(line) for line in (allranks.run() / "metrics.jsonl").read_text().splitlines()]
    accuracies = [f"{100 * record['accuracy']:.2f}" for record in records if "accuracy" in record]
    assert accuracies == [accuracy for _, _, accuracy in epochs]
    assert_nothing_left(allranks.run())


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


def test_only_rank_0_touches_the_checkpoints(warm_ranks, tmp_path):
    folder, script = tmp_path / "checkpoints", tmp_path / "writers.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(RECIPE)!r})\n{WRITERS}")
    write_mnist(tmp_path)
    own = ["--data-dir", tmp_path, "--batch-size", 8, "--epochs", 2, "--checkpoint-dir", folder]
    done = warm_ranks.run_ranks(script, [RECIPE / "train.py", folder, *own], tmp_path, CUDA_VISIBLE_DEVICES="")
    assert [code for code, _, _ in done] == [0, 0], done
    first, second = (out.decode().splitlines() for _, out, _ in done)
    touched = [line for line in first if line.startswith("0 o")]
    assert touched.count("0 os.mkdir checkpoints") == 1
    assert touched.count("0 open checkpoint.json") == 2
    assert second == []


#: Of three samples, rank 0 has two and rank 1 has one. With a mean of means, or only its own samples, a rank is wrong.
SHARES = """
import json, train, allranks, torch
from torch.utils.data import TensorDataset

images = torch.tensor(json.loads(sys.argv[1]))
labels = torch.arange(len(images))
with allranks.init() as ctx:
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight.data = torch.eye(4)
    print(train.evaluate(ctx, model, TensorDataset(images, labels)))
"""


def test_the_accuracy_is_that_of_all_samples_on_all_ranks(allranks):
    # The answers to samples 0 and 2 are right; to 1 it is wrong.
    answers = [[4.0, 0, 0, 0], [3.0, 0, 0, 0], [0, 0, 2.0, 0]]
    for (line,) in run_recipe(allranks, SHARES, json.dumps(answers)):
        assert float(line) == pytest.approx(2 / 3)
