"""A training whose newest checkpoint is corrupt, or whose disk is full, ends as if nothing had happened."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from allranks.record.checkpoints import entries, problems, unfinished
from exact_runs import command, trained, undisturbed, weights, weights_in

#: Each rank writes a part of a sharded model.
SHARDED = ("--epochs", "6", "--every", "3", "--quiet", "--strategy", "fsdp")
FILES = ("checkpoint.json", "config.json", "objects.pt", "rank-0.data", "rank-0.json", "rank-1.data", "rank-1.json")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 8  # The rest of a data file may be padding.
    path.write_bytes(data)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broken-off")


@pytest.fixture
def broken_off(allranks: Any, kept: Path) -> Callable[[str], Path]:
    """Give a function that puts checkpoints of a ``killed`` or a ``stopped`` training into the directory ``hurt``."""

    def give(how: str) -> Path:
        folder: Path = allranks.folder / "hurt"
        if not (kept / how).exists():
            restarts, code = {"killed": ("0", 137), "stopped": ("1", 75)}[how]
            done = allranks(*command("hurt", *SHARDED, "--hurt", flags=("--max-restarts", restarts)))
            assert done.rc == code, done.stderr
            folder.rename(kept / how)
        shutil.copytree(kept / how, folder, symlinks=True)
        return folder

    return give


@pytest.mark.parametrize(("name", "how"), [*zip(FILES, cycle(["killed", "stopped"]))])
def test_damaged_checkpoints_cost_nothing_but_steps(
    allranks: Any, broken_off: Callable[[str], Path], name: str, how: str
) -> None:
    """The first of each kind takes more than 10 s: it trains what the others copy.

    They are continued without the command: that is the same for a whole checkpoint (``test_exact_resume.py``).
    """
    folder = broken_off(how)
    newest, second, whole = (entry.path for entry in entries(folder))
    for path, damage in zip((newest, second), (truncate, flip) if how == "killed" else (flip, truncate), strict=True):
        damage(path / name)
    out, err = trained(allranks, "hurt", *SHARDED)
    assert weights_in(out) == undisturbed(allranks, *SHARDED)
    skipped = re.findall(r"hurt/(.*) is corrupt and is skipped: (.*?): ", err)
    assert skipped == [(newest.name, name), (second.name, name)]
    assert f"continuing from hurt/{whole.name} (" in err
    # On a slow disk the save of one step may take until the end: then that of the newest is still the damaged one.
    intact = [entry.path.name for entry in entries(folder) if not list(problems(entry.path))]
    assert intact[0] > whole.name


@pytest.mark.parametrize("strategy", ["flat", "fsdp"])
def test_a_full_disk_costs_saves_and_no_steps(allranks: Any, small_disk: Path, strategy: str) -> None:
    """It takes more than 10 s: three trainings."""
    # A megabyte each: there is room for one, and without the filler for three and the one that is being written.
    options = ("--epochs", "15", "--every", "5", "--quiet", "--width", "8000", "--strategy", strategy)
    folder, filler = small_disk / "checkpoints", small_disk / "filler"
    filler.write_bytes(bytes(9 << 19))
    full = allranks(*command(folder, *options))
    whole = undisturbed(allranks, *options)
    assert weights(full) == whole
    failed = re.findall(r"error: the checkpoint of step (\d+) could not be saved to .*\n.* why: (.*)", full.stderr)
    assert failed
    assert all(re.fullmatch(r"(rank [01] on [^:]+: No space left on device(; |$))+", why) for _, why in failed), failed
    (old,) = entries(folder)
    assert 0 < old.step < min(int(step) for step, _ in failed)
    assert not list(problems(old.path))
    assert not unfinished(folder)
    assert (folder / "latest").resolve() == old.path
    filler.unlink()
    out, err = trained(allranks, folder, *options)
    assert weights_in(out) == whole
    assert f"continuing from {old.path} (" in err
    assert "could not be saved" not in err
    assert entries(folder)[0].step > old.step
