"""Where results go that nobody can take, and commands in places that are not a plain shell."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import allranks as package
from waiting import PATIENCE

#: Calls the command from inside a rank; rank 0 starts a run of its own as well.
INSIDE = """\
import os, subprocess, sys

def call(*args):
    done = subprocess.run([sys.executable, "-m", "allranks", *args], capture_output=True, text=True)
    print(done.returncode, done.stdout.strip() or done.stderr)

call("--version")
if os.environ["RANK"] == "0":
    call("run", "inner.py", "--runs-folder", "inner runs")
"""
INNER = """\
import os, pathlib
run = pathlib.Path(os.environ["ALLRANKS_RUN_DIR"])
print("inner", os.environ["RANK"], os.environ["WORLD_SIZE"], run.parent.name, run.name == os.environ["ALLRANKS_RUN_ID"])
"""


@pytest.mark.parametrize("flags", [[], ["-f"], ["--tail", "5"]], ids=str)
def test_logs_onto_a_full_disk(allranks, failed_run: Path, flags: list[str]):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "allranks", "logs", "--rank", "0", *flags],
            cwd=failed_run.parent.parent,
            env=allranks.env,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
        )
    fix = "write to a file elsewhere, or free space where this one is"
    message = f"error: cannot write to stdout\n  why: No space left on device\n  fix: {fix}\n"
    assert (done.returncode, done.stderr) == (1, message)


def _with_terminal_at_stdout(allranks, err: Path, *args: str) -> str:
    """Run a command with a terminal as stdout and a file as stderr; return what the terminal got."""
    ours, theirs = pty.openpty()
    with open(err, "wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "allranks", *args],
            cwd=allranks.folder,
            env={**allranks.env, "TERM": "xterm-256color"},
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=sink,
        )
    os.close(theirs)
    said = b""
    try:
        while data := os.read(ours, 65536):
            said += data
    except OSError:
        pass  # Linux reports a terminal that nobody holds any more so.
    finally:
        os.close(ours)
        process.wait(60)
    return said.decode()


def test_no_escape_codes_in_a_file_beside_a_terminal(allranks):
    allranks.script("import sys\nprint('hello')\nprint('oops', file=sys.stderr)\nsys.exit(3)\n")
    err = allranks.folder / "err"
    for args in (["run", "train.py"], ["logs"], ["logs", "-f"]):
        said = _with_terminal_at_stdout(allranks, err, *args)
        text = err.read_text()
        assert "[0] oops\n" in text
        assert "\x1b" not in text
        assert "[0] hello\r\n" in said


def test_the_command_works_inside_a_rank(allranks):
    """A rank finds the part of the package that its run carries first, and that has no command line."""
    allranks.script(INNER, "inner.py")
    allranks.script(INSIDE)
    done = allranks("run", "train.py", "--nproc-per-node", "2")
    assert done.rc == 0, done.stderr
    version = f"0 allranks {package.__version__}"
    # Each rank by itself: two ranks that say the same in their own time may come on one line or on two.
    assert allranks("logs", "--rank", "1").stdout.splitlines() == [f"[1] {version}"]
    said = allranks("logs", "--rank", "0").stdout.splitlines()
    assert said == [f"[0] {version}", "[0] 0 [0] inner 0 1 inner runs True"]
    assert allranks.record()["status"]["state"] == "SUCCEEDED"
    (inner,) = (path for path in (allranks.folder / "inner runs").iterdir() if path.name != "latest")
    assert allranks.record(inner)["status"]["state"] == "SUCCEEDED"


def test_a_run_where_python_keeps_its_caches_elsewhere(allranks):
    """The archive has all modules compiled anyway: a node need not have that other place."""
    caches = allranks.folder / "caches"
    allranks.script("print('hello')")
    done = allranks("run", "train.py", PYTHONPYCACHEPREFIX=str(caches))
    assert (done.rc, done.stdout) == (0, "[0] hello\n"), done.stderr
    with zipfile.ZipFile(allranks.run() / "code") as code:
        names = set(code.namelist())
    sources = {name for name in names if name.endswith(".py")}
    assert {"__main__.py", "allranks/agent/stores.py"} <= sources
    assert names - sources == {f"{name}c" for name in sources}
