"""allranks top on a terminal: shown again and again, until the run's end."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from terminals import Terminal
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
