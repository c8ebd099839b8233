"""allranks ps --watch, status --watch and top on a terminal: shown again and again, until Ctrl-C or the run's end."""

from __future__ import annotations

import re
from contextlib import ExitStack, closing

import pytest

from terminals import Terminal
from waiting import PATIENCE, wait_for

#: Ends when it is told to.
WAITING = "import pathlib, time\nwhile not pathlib.Path('end').exists():\n    time.sleep(0.01)\n"
CTRL_C = "\x03"


@pytest.fixture
def at_terminal(allranks):
    """Start commands in a terminal, which is taken away at the end."""
    with ExitStack() as stack:
        allranks.env["TERM"] = "xterm"
        yield lambda *words: stack.enter_context(closing(Terminal(allranks, *words)))


def test_runs_are_watched_until_ctrl_c(allranks, at_terminal):
    allranks.script(WAITING)
    run = allranks.popen("run", "train.py")
    wait_for("the run", (allranks.folder / "runs" / "latest").exists)
    terminal = at_terminal("ps", "--watch")
    terminal.read_until("train-[0-9-]+  .*RUNNING")
    (allranks.folder / "end").touch()
    terminal.read_until("train-[0-9-]+  .*SUCCEEDED")
    terminal.type(CTRL_C)
    assert terminal.wait() == 130
    assert "Traceback" not in terminal.shown
    assert run.wait(PATIENCE) == 0


def test_the_newest_runs_are_shown_where_the_terminal_is_short(allranks, at_terminal):
    allranks.script("")
    for name in ("first", "second", "third"):
        assert allranks("run", "train.py", "--no-check", "--name", name).rc == 0
    allranks.env["LINES"] = "4"
    terminal = at_terminal("ps", "--watch")
    terminal.read_until("third-.*\n")
    terminal.type(CTRL_C)
    assert terminal.wait() == 130
    assert re.findall("first|second|third", terminal.shown)[:2] == ["second", "third"]


def test_top_says_that_the_run_has_ended(allranks, at_terminal):
    allranks.script(WAITING)
    run = allranks.popen("run", "train.py")
    wait_for("its usage", lambda: [*allranks.folder.glob("runs/latest/attempts/000/node-000/usage.json")])
    terminal = at_terminal("top")
    terminal.read_until(r"NODE +CPUS +MEMORY")
    (allranks.folder / "end").touch()
    terminal.read_until(r"train-[0-9-]+ has already ended: SUCCEEDED, \d+ s ago")
    assert terminal.wait() == 0
    assert run.wait(PATIENCE) == 0


def test_the_status_of_a_run_is_watched_until_the_run_ends(allranks, at_terminal):
    allranks.script(WAITING)
    run = allranks.popen("run", "train.py")
    wait_for("the run", (allranks.folder / "runs" / "latest").exists)
    terminal = at_terminal("status", "--watch")
    terminal.read_until("state +.*RUNNING")
    (allranks.folder / "end").touch()
    terminal.read_until("state +.*SUCCEEDED")
    assert terminal.wait() == 0
    assert run.wait(PATIENCE) == 0
