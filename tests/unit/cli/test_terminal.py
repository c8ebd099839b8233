"""What a person at a terminal sees: colours there, and none with NO_COLOR."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest


def at_terminal(allranks, *args: str, **env: str) -> bytes:
    """Run a command with a terminal as stdin, stdout and stderr; return all that it wrote there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "allranks", *args],
        cwd=allranks.folder,
        env={**allranks.env, **env},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux reports a terminal that nobody holds any more so.
            break
        if not data:
            break
        said += data
    os.close(ours)
    process.wait(60)
    return said


def test_colour_on_a_terminal(allranks):
    assert b"\x1b[1m\x1b[31merror:\x1b[0m there is no run in " in at_terminal(allranks, "status", TERM="xterm")


@pytest.mark.parametrize("env", [{"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_no_colour_where_it_is_not_wanted(allranks, env: dict[str, str]):
    allranks.script("print('hello')\nprint('a\\rb\\rc', flush=True)\n")
    said = at_terminal(allranks, "run", "train.py", **env)
    assert b"[0] hello" in said
    assert b"\x1b[3" not in said
    assert b"error" not in said
    if env["TERM"] == "dumb":
        assert b"\x1b" not in said


def test_ranks_have_colours_of_their_own(allranks):
    allranks.script("print('hello')\n")
    assert b"\x1b[36m[0]\x1b[0m hello" in at_terminal(allranks, "run", "train.py", TERM="xterm")
