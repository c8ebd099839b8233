"""Several users share one directory of runs, and may not read each other's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strangers import why_no_strangers

pytestmark = pytest.mark.skipif(why_no_strangers() is not None, reason=why_no_strangers() or "")

NOBODY = 65534
#: Becomes another user once all is imported that it may have no right to read then.
AS_NOBODY = f"""\
import os, sys
import allranks.cli.cancel, allranks.cli.ps, allranks.cli.resume, allranks.cli.status, allranks.launch.refresh
import allranks.cli.failure, allranks.clusters.local, allranks.launch.submit, encodings.idna
from allranks.cli.main import main
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
main(sys.argv[1:])
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """Give a directory of runs that all users may enter and write to, as /tmp is."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


@pytest.fixture
def nobody(allranks, shared: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Give a function that runs the command as another user."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        env = {**allranks.env, "ALLRANKS_RUNS_FOLDER": str(shared)}
        command = [sys.executable, "-c", AS_NOBODY, *args]
        return subprocess.run(command, cwd="/usr", env=env, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def roots_run(allranks, shared: Path) -> Path:
    """Give a finished run of root's in the shared directory; ``latest`` points to it."""
    allranks.script("print('hello')\n")
    assert allranks("run", "train.py", "--name", "roots", "--runs-folder", str(shared)).rc == 0
    return (shared / "latest").resolve()


def copied(run: Path, name: str, user: int, group: int, mode: int) -> Path:
    """Make a copy of a run under another id, of another user or group, and older than it."""
    copy = run.with_name(name)
    shutil.copytree(run, copy)
    record = json.loads((copy / "record.json").read_text())
    (copy / "record.json").write_text(json.dumps({**record, "id": name}))
    for path in (copy, *copy.rglob("*")):
        os.chown(path, user, group)
        path.chmod(mode if path.is_dir() else mode & 0o666)
    os.utime(copy / "plan.json", (1, 1))
    return copy


def test_runs_of_others_are_named_and_hide_none_of_ones_own(roots_run: Path, nobody) -> None:
    copied(roots_run, "mine", NOBODY, NOBODY, 0o700)
    copied(roots_run, "theirs", 0, NOBODY, 0o750)
    listed = nobody("ps")
    assert listed.returncode == 0
    assert listed.stderr == f"allranks: note: 1 run of other users cannot be read: {roots_run.name}\n"
    assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [
        ["mine", "SUCCEEDED"],
        ["theirs", "SUCCEEDED"],
    ]
    whole = json.loads(nobody("ps", "--json").stdout)
    assert [run["id"] for run in whole] == ["mine", "theirs"]
    newest = nobody("status")
    assert (newest.returncode, newest.stdout.splitlines()[0].split()) == (0, ["run", "mine"])
    assert nobody("status", "thei").stdout.splitlines()[0].split() == ["run", "theirs"]


@pytest.mark.parametrize("verb", ["status", "cancel", "resume"])
def test_a_run_of_another_user_that_is_named(roots_run: Path, nobody, verb: str) -> None:
    error = (
        f"error: cannot read {roots_run}/record.json\n"
        "  why: Permission denied\n"
        "  fix: it is a run of root, who can share the next one: --group-readable\n"
    )
    for name in (roots_run.name, str(roots_run)):
        done = nobody(verb, name)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", error)


def test_only_runs_of_others(roots_run: Path, shared: Path, nobody) -> None:
    done = nobody("status")
    error = f"error: there is no run in {shared}\n  fix: start one: allranks run train.py\n"
    assert (done.returncode, done.stderr) == (2, error)
    listed = nobody("ps")
    assert (listed.returncode, listed.stdout) == (0, "")
    assert listed.stderr == (
        f"allranks: note: 1 run of other users cannot be read: {roots_run.name}\n"
        f"no runs in {shared}\nnext: allranks run train.py\n"
    )
