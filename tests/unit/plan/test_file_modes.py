"""Who may read a run's directory: its owner, and the group if asked; the ranks' own files follow the user's umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = """\
import os, pathlib, sys
pathlib.Path("own").write_text("x")
pathlib.Path("own-folder").mkdir()
mask = os.umask(0)
os.umask(mask)
print(oct(mask))
print("err", file=sys.stderr)
"""


@pytest.fixture(params=[0o022, 0o077, 0o007, 0o000], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(before)


def modes(run: Path) -> dict[str, int]:
    """Return the permission bits of all that is in a run's directory, and of the directory."""
    found = {".": run.stat().st_mode & 0o777}
    for path in run.rglob("*"):
        if not path.is_symlink():
            found[str(path.relative_to(run))] = path.stat().st_mode & 0o777
    return found


def expected(run: Path, folder: int, file: int) -> dict[str, int]:
    found = {
        name: folder if (run / name).is_dir() else file | (0o100 if name.endswith(".sh") else 0) for name in modes(run)
    }
    return {**found, "key": 0o600}


def check(allranks, umask: int, folder: int, file: int, *flags: str) -> None:
    allranks.script(SCRIPT)
    result = allranks("run", "train.py", *flags)
    assert (result.rc, result.stdout) == (0, f"[0] {oct(umask)}\n")
    run = allranks.run()
    names = modes(run)
    node = "attempts/000/node-000"
    assert {f"{node}/{name}" for name in ("agent.jsonl", "heartbeat", "lines.idx", "rank-0.out", "rank-0.err")} < set(
        names
    )
    assert names == expected(run, folder, file)
    assert (allranks.folder / "own").stat().st_mode & 0o777 == 0o666 & ~umask
    assert (allranks.folder / "own-folder").stat().st_mode & 0o777 == 0o777 & ~umask


def test_only_the_owner_may_read_a_run(allranks, umask: int):
    check(allranks, umask, 0o700, 0o600)


def test_the_group_may_read_a_run_if_asked(allranks, umask: int):
    check(allranks, umask, 0o750, 0o640, "--group-readable")


def test_modes_stay_when_the_end_is_written_down(allranks):
    allranks.script(SCRIPT)
    assert allranks("run", "train.py", "--group-readable").rc == 0
    assert allranks("status").rc == 0
    assert (allranks.run() / "record.json").stat().st_mode & 0o777 == 0o640
