"""Which Python the ranks run on, and why: as asked, that of allranks, or that of the active environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import allranks as package

SITE = Path(torch.__file__).parents[1]
WHO = "import importlib.util, sys\nprint(sys.executable, importlib.util.find_spec('tor' 'ch') is not None)\n"


def venv(folder: Path) -> Path:
    """Make a virtual environment without anything in it, and return its directory of packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    return site


@pytest.fixture(scope="session")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the Python of an environment of allranks alone, as pipx and uv make one: all that it needs, and no torch."""
    folder = tmp_path_factory.mktemp("tool")
    site = venv(folder)
    for entry in SITE.iterdir():
        if not entry.name.startswith(("torch", "functorch", "allranks", "__editable__")) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    (site / "allranks").symlink_to(Path(package.__file__).parent)
    return folder / "bin/python"


@pytest.fixture(scope="session")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give an environment of a user's that has torch, and no allranks."""
    folder = tmp_path_factory.mktemp("mine")
    (venv(folder) / "torch.pth").write_text(f"{SITE}\n")
    return folder


def chosen(shown: str) -> tuple[str, str]:
    """Return the Python that a plan names, and why."""
    (found,) = [reason for reason in json.loads(shown)["reasons"] if reason["subject"] == "python"]
    return found["value"], found["why"]


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_active_environment_is_used_where_allranks_has_no_torch(
    allranks: Any, tool: Path, users: Path, variable: str
) -> None:
    allranks.script(WHO)
    env = {**allranks.env, variable: str(users)}

    def say(*words: str) -> str:
        done = subprocess.run([tool, "-m", "allranks", *words], cwd=allranks.folder, env=env, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    assert chosen(say("plan", "train.py", "--json")) == (
        f"{users}/bin/python",
        f"that of the active environment: the Python of allranks, {tool}, has no torch",
    )
    assert say("run", "train.py") == f"[0] {users}/bin/python True\n"
    assert chosen(say("plan", "train.py", "--json", "--python", sys.executable)) == (
        sys.executable,
        "environment.python",
    )
    assert chosen(say("plan", "train.py", "--json", "--venv", str(users))) == ("python", "that of environment.venv")


def test_an_active_environment_that_does_not_work_is_named(allranks: Any, tool: Path, tmp_path: Path) -> None:
    allranks.script(WHO)
    broken = tmp_path / "broken"
    (broken / "bin").mkdir(parents=True)
    (broken / "bin/python").write_text("#!/bin/false\n")
    (broken / "bin/python").chmod(0o755)
    env = {**allranks.env, "VIRTUAL_ENV": str(broken)}
    command = [tool, "-m", "allranks", "plan", "train.py", "--json"]
    done = subprocess.run(command, cwd=allranks.folder, env=env, capture_output=True, text=True, check=True)
    why = f"the Python of allranks; that of the active environment {broken} does not run, or is older than Python 3.10"
    assert chosen(done.stdout) == (str(tool), why)


def test_an_active_environment_without_a_python_is_named(allranks: Any, tmp_path: Path) -> None:
    allranks.script(WHO)
    why = f"the Python of allranks; the active environment {tmp_path} has no bin/python"
    assert chosen(allranks("plan", "train.py", "--json", VIRTUAL_ENV=str(tmp_path)).stdout) == (sys.executable, why)


def test_the_python_of_allranks_is_kept_where_it_has_torch(allranks: Any, users: Path) -> None:
    allranks.script(WHO)
    why = f"the Python of allranks, which has torch; for the active environment {users}: --python {users}/bin/python"
    assert chosen(allranks("plan", "train.py", "--json", VIRTUAL_ENV=str(users)).stdout) == (sys.executable, why)
    for env in ({}, {"VIRTUAL_ENV": sys.prefix}):
        shown = allranks("plan", "train.py", "--json", **env).stdout
        assert chosen(shown) == (sys.executable, "the Python of allranks")


def test_the_error_of_a_missing_torch_names_the_active_environment(allranks: Any, tool: Path, users: Path) -> None:
    allranks.script("import torch\n")
    env = {"VIRTUAL_ENV": str(users)}
    done = allranks("run", "train.py", "--python", str(tool), **env)
    assert done.rc == 1
    assert (
        f"error: {tool} cannot import torch\n  why: No module named 'torch'\n  fix: install torch there, or name the "
        f"environment that has it: environment.venv, .conda or .python; active is {users}\n"
    ) in done.stderr
