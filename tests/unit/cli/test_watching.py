"""allranks top on a terminal: shown again and again, until the run's end."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing

import pytest

from terminals import Terminal, Tmux
from waiting import PATIENCE, wait_for

#: Ends when it is told to.
WAITING = "import pathlib, time\nwhile not pathlib.Path('end').exists():\n    time.sleep(0.01)\n"


@pytest.fixture
def at_terminal(allranks):
    """Start commands in a terminal, which is taken away at the end."""
    with ExitStack() as stack:
        allranks.env["TERM"] = "xterm"
        yield lambda *words: stack.enter_context(closing(Terminal(allranks, *words)))


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


def test_top_is_drawn_in_place_below_what_was_there_and_stays_when_it_is_interrupted(allranks, tmp_path):
    allranks.script(WAITING.replace("time.sleep(0.01)", "time.sleep(0.1)\n    print('a step', flush=True)"))
    run = allranks.popen("run", "train.py")
    wait_for("its usage", lambda: [*allranks.folder.glob("runs/latest/attempts/000/node-000/usage.json")])
    allranks.env["TERM"] = "screen"
    with closing(Tmux(allranks, tmp_path / "tmux", (100, 10), "top")) as terminal:
        wait_for("a sample", lambda: terminal.screen[-1].endswith(" ago"))
        first = terminal.screen[-1]
        wait_for("the next sample", lambda: terminal.screen[-1] != first)
        terminal.type("C-c")
        wait_for("its end", lambda: terminal.screen[-1].endswith("^C"))
        header, row = terminal.history.strip().splitlines()
    assert header.split()[0] == "NODE"
    assert row.split()[:2] == ["0", os.uname().nodename]
    (allranks.folder / "end").touch()
    assert run.wait(PATIENCE) == 0
