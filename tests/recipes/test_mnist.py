"""The MNIST recipe as a user starts it: once with torchrun; elsewhere its ranks are forked with all imports done."""

from __future__ import annotations

import gzip
import os
import re
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from environments import clean_environment
from mnist_files import random_idx, write_mnist
from waiting import PATIENCE
from warm_python import free_port

RECIPE = Path(__file__).parents[2] / "recipes" / "mnist" / "train.py"
EPOCH = re.compile(r"^Epoch (\d+) - Avg Loss: (\d+\.\d{4}), Accuracy: (\d+\.\d{2})%$", re.MULTILINE)
STARTED_BY = ("RANK", "WORLD_SIZE", "LOCAL", "MASTER_", "TORCHELASTIC", "SLURM_", "PBS_", "OMPI_", "PMI", "ALLRANKS_")


def under_torchrun(*args):
    env = {name: value for name, value in os.environ.items() if not name.startswith(STARTED_BY)}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command = [*launcher, str(RECIPE), *map(str, args)]
    options = {"env": env, "cwd": args[-1], "capture_output": True, "text": True, "timeout": 150, "check": False}
    return subprocess.run(command, **options)


@pytest.fixture
def train(warm_ranks, tmp_path):
    """Give a function that runs the recipe, alone or on ranks that are started as torchrun starts them."""

    def run(*args, ranks=1, **env):
        if ranks == 1:
            env = {**clean_environment(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
            with closing(warm_ranks.start("script", str(RECIPE), [*map(str, args)], tmp_path, env)) as process:
                done = [process.finish(PATIENCE)]
        else:
            done = warm_ranks.run_ranks(RECIPE, args, tmp_path, ranks, CUDA_VISIBLE_DEVICES="", **env)
        codes, outs, errs = zip(*done, strict=True)
        out, err = (b"".join(texts).decode() for texts in (outs, errs))
        return subprocess.CompletedProcess(args, max(codes), out, err)

    return run


def test_two_ranks_reach_97_percent(tmp_path):
    """It takes more than 10 s: it is a whole training under torchrun."""
    done = under_torchrun("--checkpoint-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Processes: 2 on cpu (gloo), master node: 127.0.0.1\n" in done.stdout
    epochs = EPOCH.findall(done.stdout)
    assert [int(epoch) for epoch, _, _ in epochs] == list(range(1, 9))
    assert float(epochs[-1][2]) >= 97
    assert float(epochs[-1][1]) < float(epochs[0][1])
    saved = ["latest", "step-000000138", "step-000000161", "step-000000184"]
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".jsonl")) == saved
    assert "\r" not in done.stderr


def test_stopped_and_continued_equals_undisturbed_to_the_bit(tmp_path, train):
    """It takes more than 10 s on a slow machine: four trainings."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    write_mnist(tmp_path)
    common = ["--data-dir", tmp_path, "--batch-size", 8, "--accumulate", 2, "--precision", "bf16"]
    undisturbed = train(*common, "--epochs", 2, "--checkpoint-dir", whole, ranks=2)
    assert "batch: 4 samples (2 ranks x 2), 8 batches an epoch\n" in undisturbed.stdout
    assert "effective batch: 8 samples a step (2 micro-batches of 4)\n" in undisturbed.stdout
    train(*common, "--epochs", 1, "--checkpoint-dir", parts, ranks=2)
    continued = train(*common, "--epochs", 2, "--checkpoint-dir", parts, ranks=2)
    assert f"continuing from {parts}/step-000000004 (1 epoch done, step 4)" in continued.stderr
    assert EPOCH.findall(continued.stdout) == EPOCH.findall(undisturbed.stdout)[1:]
    assert (parts / "latest").readlink() == (whole / "latest").readlink() == Path("step-000000008")
    assert (parts / "latest" / "rank-0.data").read_bytes() == (whole / "latest" / "rank-0.data").read_bytes()
    again = train(*common, "--epochs", 2, "--checkpoint-dir", parts)
    assert "Trained for 2 epochs" in again.stdout
    assert not EPOCH.findall(again.stdout)


@pytest.mark.parametrize(("joint", "packed", "watched"), [("-", False, False), (".", True, True)])
def test_mnist_files_and_a_progress_bar_on_a_terminal(tmp_path, train, joint, packed, watched):
    write_mnist(tmp_path, joint, packed)
    env = {"ALLRANKS_TERMINAL": "1"} if watched else {}
    done = train("--data-dir", tmp_path, "--epochs", 1, "--checkpoint-dir", tmp_path / "out", **env)
    assert done.returncode == 0, done.stderr
    assert len(EPOCH.findall(done.stdout)) == 1
    assert ("\rEpoch 1:   0%|" in done.stderr) == watched
    assert bool(re.search(r"\r +\r", done.stderr)) == watched  # The bar is wiped.


@pytest.fixture
def data(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE.parent))
    import data

    return data


def test_idx_values_are_read_as_written(tmp_path, data):
    path = tmp_path / "x-ubyte"
    path.write_bytes(struct.pack(">HBBII", 0, 8, 2, 2, 3) + bytes([0, 1, 2, 3, 4, 255]))
    assert data.read_idx(path).tolist() == [[0, 1, 2], [3, 4, 255]]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "cannot read"),
        (b"<html>not found</html>", "is no IDX file of bytes"),
        (random_idx(4, 2, high=9)[:-1], "is corrupt"),
        (random_idx(4, 2, high=9) + b"x", "is corrupt"),
        (random_idx(4, 2, high=9)[:7], "cannot read"),
        (struct.pack(">HBBI", 0, 8, 1, 0), "is corrupt"),
        (struct.pack(">HBB", 0, 13, 1) + bytes(8), "is no IDX file of bytes"),
    ],
)
def test_bad_idx_files_are_named(tmp_path, data, content, text):
    path = tmp_path / "labels-ubyte"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        data.read_idx(path)
    assert text in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_damaged_gzip_file_is_named(tmp_path, data):
    path = tmp_path / "labels.gz"
    packed = gzip.compress(random_idx(64, 64, high=256))
    for content in (packed[:40], b"no gzip", packed[:60] + b"\xff" * 20 + packed[80:]):
        path.write_bytes(content)
        with pytest.raises(SystemExit, match="cannot read"):
            data.read_idx(path)


def test_a_missing_folder_and_files_that_do_not_fit_are_named(tmp_path, train, data):
    done = train("--data-dir", tmp_path / "nowhere", "--checkpoint-dir", tmp_path)
    assert done.returncode == 1
    assert f"error: there is no directory {tmp_path}/nowhere\n  fix: --data-dir DIR, or leave it out" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(SystemExit) as caught:
        data.load_mnist(tmp_path)
    assert str(caught.value).splitlines() == [
        f"error: {tmp_path} has no file train-images-idx3-ubyte",
        "  why: --data-dir needs MNIST's four files; train-images-idx3-ubyte.gz, train-images.idx3-ubyte, "
        "train-images.idx3-ubyte.gz would be read too",
        "  fix: put the file there, or leave --data-dir out to train on scikit-learn's digits",
    ]
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(random_idx(9, high=10))
    with pytest.raises(SystemExit, match=r"the t10k files hold images of shape \(10, 28, 28\)"):
        data.load_mnist(tmp_path)


def test_micro_batches_and_recomputed_activations_change_no_loss(tmp_path, train):
    """Sums are in another order, which single precision rounds differently: the last digit printed may differ."""
    write_mnist(tmp_path)
    losses = []
    for options in ([], ["--accumulate", 4, "--checkpoint-activations"]):
        folder = tmp_path / f"{len(options)}"
        done = train("--data-dir", tmp_path, "--batch-size", 8, "--epochs", 1, "--checkpoint-dir", folder, *options)
        assert done.returncode == 0, done.stderr
        losses.append(float(EPOCH.search(done.stdout)[2]))
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)


KEPT = """
import sys
sys.path.insert(0, sys.argv[1])
import allranks, torch, train

with allranks.init() as ctx:
    for blocks in ([], [train.Block]):
        model = ctx.prepare(train.Net(), checkpoint_activations=blocks)
        weights, kept = {part.untyped_storage().data_ptr() for part in model.parameters()}, {}
        def keep(tensor):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage  # It stays: no other gets its address.
            return tensor
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(torch.rand(64, 1, 28, 28)).sum()
        print(round(sum(storage.nbytes() for place, storage in kept.items() if place not in weights) / 1e6, 1))
"""


def test_activations_take_the_memory_that_the_readme_states(run_python, tmp_path):
    env = {**clean_environment(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_python(KEPT, RECIPE.parent, env=env, cwd=tmp_path)
    plain, saving = done.stdout.split()
    assert f"{saving} MB are kept for it instead of {plain} MB" in (RECIPE.parent / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("--accumulate", 3, "--batch-size 64 does not divide by --accumulate 3"),
        ("--epochs", 0, "--epochs, --batch-size, --accumulate and --lr must be greater than 0"),
        ("--lr", -1, "--epochs, --batch-size, --accumulate and --lr must be greater than 0"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, train, name, value, text):
    done = train(name, value, "--checkpoint-dir", tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"train.py: error: {text}"


def test_a_batch_that_does_not_divide_is_refused(tmp_path, train):
    done = train("--batch-size", 33, "--checkpoint-dir", tmp_path, ranks=2)
    assert done.returncode == 1
    assert "global_batch_size=33 does not divide by 2 ranks" in done.stderr
    assert "fix: global_batch_size=32 or 34, or another number of ranks" in done.stderr
