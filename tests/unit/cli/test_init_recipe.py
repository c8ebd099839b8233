"""``allranks init --recipe`` copies a complete training; wheels have them all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[3]
NAMES = ["audio-language", "bring-your-own", "language-model", "mnist", "multimodal-lightning", "reid"]


def files_of(recipe: str) -> dict[str, bytes]:
    folder = ROOT / "recipes" / recipe
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_the_recipes_are_listed(allranks: Any) -> None:
    listed = allranks("init", "--list")
    assert (listed.rc, listed.stderr) == (0, "")
    header, *rows = listed.stdout.splitlines()
    assert header.split() == ["RECIPE", "WHAT", "IT", "TRAINS"]
    assert [row.split()[0] for row in rows] == NAMES == sorted(path.name for path in (ROOT / "recipes").iterdir())
    assert rows[NAMES.index("mnist")].endswith(
        "  A small convolutional network that learns handwritten digits, on one rank or many, CPU or GPU"
    )
    assert not list(allranks.folder.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_copied(allranks: Any, name: str) -> None:
    done = allranks("init", "mine", "--recipe", name)
    assert (done.rc, done.stderr.splitlines()[-1]) == (0, "next: cd mine && allranks run")
    copy = allranks.folder / "mine"
    ignored = copy / ".gitignore"
    assert ignored.read_text() == "runs/\ncheckpoints/\nmetrics.jsonl\n__pycache__/\n"
    assert {str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path != ignored} == files_of(
        name
    )
    assert not [path for path in copy.iterdir() if b"recipes/" in path.read_bytes()]  # Paths are those of the copy.
    planned = allranks("plan", "mine/job.yaml", "--nproc-per-node", "2")
    assert planned.rc == 0, planned.stderr


def test_a_recipe_overwrites_nothing(allranks: Any) -> None:
    allranks.script("mine")
    refused = allranks("init", "--recipe", "mnist")
    assert (refused.rc, refused.message) == (
        2,
        {
            "error": "train.py exists already",
            "fix": "write into another directory (allranks init DIRECTORY), or overwrite with --force",
        },
    )
    assert [path.name for path in allranks.folder.iterdir()] == ["train.py"]
    assert allranks("init", "--recipe", "mnist", "--force").rc == 0
    assert (allranks.folder / "train.py").read_bytes() == files_of("mnist")["train.py"]


def test_a_recipe_that_does_not_exist_is_refused(allranks: Any) -> None:
    refused = allranks("init", "--recipe", "mnits")
    fix = f"the recipes are {', '.join(NAMES)}; allranks init --list"
    assert (refused.rc, refused.message) == (2, {"error": "no recipe 'mnits'", "fix": fix})


def test_a_wheel_has_the_recipes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=skipped)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if name.startswith("allranks/recipes/")}
    expected = {f"allranks/recipes/{name}/{path}": text for name in NAMES for path, text in files_of(name).items()}
    assert found == expected
