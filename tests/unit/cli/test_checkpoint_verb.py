"""``allranks checkpoint``: listing, checking and exporting what a training has saved."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from allranks.errors import RankError
from allranks.record.checkpoints import read_manifest
from allranks.runtime.checkpoint.restore import load_objects
from environments import clean_environment

SAVE = """
import torch, allranks
from torch import nn
with allranks.init(seed=1) as ctx:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[2].weight = model[1].weight
    model.bfloat16()
    model.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))
    model.register_buffer("flags", torch.tensor([True, False, True]))
    optimizer = torch.optim.Adam(model.parameters())
    checkpoints = ctx.checkpoints(
        "checkpoints", model=model, optimizer=optimizer, best="loss:min", background=False, config={"lr": 0.1})
    for loss in (0.5, 0.25):
        ctx.progress.step += 1
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        checkpoints.save(loss)
    torch.save(model.state_dict(), "expected.pt")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory, run_python):
    """Give a directory with two checkpoints, which tests do not change."""
    folder = tmp_path_factory.mktemp("saved")
    done = run_python(SAVE, env={**clean_environment(folder), "OMP_NUM_THREADS": "1"}, cwd=folder)
    assert done.rc == 0, done.stderr
    return folder


@pytest.fixture
def checkpoints(allranks, saved):
    """Give a copy of them, in the directory where the command runs."""
    import shutil

    shutil.copytree(saved, allranks.folder, dirs_exist_ok=True, symlinks=True)
    return allranks.folder / "checkpoints"


def test_ls(allranks, checkpoints):
    done = allranks("checkpoint", "ls", "checkpoints")
    assert done.rc == 0, done.stderr
    header, first, second = done.stdout.splitlines()
    assert header.split() == ["STEP", "AGE", "SIZE", "RANKS", "METRIC", "STATE"]
    assert (first.split()[0], second.split()[0]) == ("1", "2")
    assert "loss 0.25" in second
    assert second.endswith("complete  latest")


def test_ls_as_json_and_with_damage(allranks, checkpoints):
    (checkpoints / "step-000000002" / "rank-0.data").write_bytes(b"")
    (checkpoints / "step-000000003").mkdir()
    (checkpoints / ".step-000000004.tmp-a-b-1.1").mkdir()
    done = allranks("checkpoint", "ls", "checkpoints", "--json")
    found = json.loads(done.stdout)
    assert [entry["step"] for entry in found] == [1, 2, 3]
    assert [bool(entry["problem"]) for entry in found] == [False, True, True]
    assert found[1]["problem"].startswith("rank-0.data: it has 0 bytes instead of")
    assert "step 4 is being written, or was cut off" in done.stderr
    assert found[0]["parts"]["model"] == "module"


def test_ls_of_nothing(allranks):
    assert allranks("checkpoint", "ls", ".").stderr.startswith("no checkpoints in")
    assert allranks("checkpoint", "ls", "nowhere").rc == 2


def test_without_a_word_it_shows_its_help(allranks):
    done = allranks("checkpoint")
    assert (done.rc, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: allranks checkpoint")


def test_verify(allranks, checkpoints):
    done = allranks("checkpoint", "verify", "checkpoints")
    assert done.rc == 0
    assert done.stdout.splitlines() == [f"checkpoints/step-00000000{step}: complete" for step in (1, 2)]
    data = checkpoints / "step-000000002" / "rank-0.data"
    content = bytearray(data.read_bytes())
    content[7] ^= 4
    data.write_bytes(content)
    done = allranks("checkpoint", "verify", "checkpoints")
    assert done.rc == 1
    assert "step-000000002: rank-0.data: the checksum of part 1 of 1 does not fit" in done.stdout
    assert allranks("checkpoint", "verify", "checkpoints/step-000000001").rc == 0
    found = json.loads(allranks("checkpoint", "verify", "checkpoints", "--json").stdout)
    assert [len(entry["problems"]) for entry in found] == [0, 1]


def test_export_to_safetensors_without_torch(allranks, checkpoints):
    broken = allranks.folder / "none"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    done = allranks("checkpoint", "export", "checkpoints", "model.safetensors", PYTHONPATH=str(broken))
    assert done.rc == 0, done.stderr
    expected = torch.load(checkpoints.parent / "expected.pt", weights_only=True)
    found = load_file(checkpoints.parent / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert found["1.weight"].dtype == torch.bfloat16
    done = allranks("checkpoint", "export", "checkpoints", "model.pt", PYTHONPATH=str(broken))
    assert done.rc == 1
    assert "model.pt needs torch" in done.stderr


def test_export_to_pt(allranks, checkpoints):
    """It takes more than 10 s on a slow machine: two commands import torch."""
    done = allranks("checkpoint", "export", "checkpoints/latest", "model.pt")
    assert done.rc == 0, done.stderr
    assert done.stderr.startswith("wrote model.pt: model of step 2, ")
    expected = torch.load(checkpoints.parent / "expected.pt", weights_only=True)
    found = torch.load(checkpoints.parent / "model.pt", weights_only=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert allranks("checkpoint", "export", "checkpoints", "all.pt", "--all").rc == 0
    everything = torch.load(checkpoints.parent / "all.pt", weights_only=True)
    assert everything.keys() == {"model", "optimizer", "config", "step"}
    torch.optim.Adam([torch.zeros(3, 4), torch.zeros(3), torch.zeros(3, 3)]).load_state_dict(everything["optimizer"])
    assert (everything["config"], everything["step"]) == ({"lr": 0.1}, 2)


def test_export_takes_the_newest_whole_one(allranks, checkpoints):
    (checkpoints / "step-000000002" / "objects.pt").unlink()
    done = allranks("checkpoint", "export", "checkpoints", "model.safetensors")
    assert done.rc == 0, done.stderr
    assert "step-000000002 is corrupt and is skipped: objects.pt" in done.stderr
    assert "model of step 1" in done.stderr
    done = allranks("checkpoint", "export", "checkpoints/step-000000002", "other.safetensors")
    assert done.rc == 1
    assert "is corrupt" in done.stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["model.bin"], "ends neither in .safetensors nor in .pt"),
        (["expected.pt"], "exists already"),
        (["x.safetensors", "--all"], "--all exports everything to a .pt file"),
        (["x.pt", "--part", "ema"], "the checkpoint has no part ema"),
    ],
)
def test_export_of_what_makes_no_sense(allranks, checkpoints, args, text):
    done = allranks("checkpoint", "export", "checkpoints", *args)
    assert done.rc == 2
    assert text in done.stderr


class Foreign:
    """What runs a command when it is loaded from a pickle."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.fixture
def changed(checkpoints):
    """Give the newest checkpoint with an object in it that is none of ours, and a manifest that fits."""
    path = checkpoints / "step-000000002"
    objects = torch.load(path / "objects.pt", weights_only=True)
    objects["parts"]["optimizer"]["hooks"] = [1, Foreign()]
    torch.save(objects, path / "objects.pt")
    data, manifest = (path / "objects.pt").read_bytes(), read_manifest(path)
    files = {**manifest.files, "objects.pt": {"size": len(data), "crc32": zlib.crc32(data)}}
    (path / "checkpoint.json").write_text(replace(manifest, files=files).to_text())
    return path


def test_an_object_that_cannot_be_loaded_without_code_is_named(allranks, changed):
    done = allranks("checkpoint", "export", "checkpoints", "out.pt", "--all")
    assert (done.rc, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {changed.relative_to(allranks.folder)}: objects.pt holds an object of type posix.system, "
        "which cannot be loaded without running code\n"
        "  why: ctx.checkpoints() saves no such object: another program wrote or changed this checkpoint\n"
        "  fix: use one that a training of yours has saved; "
        "export of a part to a .safetensors file reads tensors alone\n"
    )
    assert not {"pwned", "out.pt"} & {path.name for path in allranks.folder.iterdir()}
    assert allranks("checkpoint", "export", "checkpoints", "out.safetensors").rc == 0


def test_objects_of_which_torch_has_written_none():
    with pytest.raises(RankError, match=r"^x: objects.pt holds an object of type posix.system, which cannot be loaded"):
        load_objects(Path("x"), pickle.dumps(Foreign(), protocol=2))
    with pytest.raises(RankError, match=r"^x: objects.pt cannot be loaded\n  why: \w+: ."):
        load_objects(Path("x"), b"abc")
