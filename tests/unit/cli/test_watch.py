"""allranks watch in a real terminal."""

from __future__ import annotations

import json
import re
import shutil
import signal
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from terminals import Terminal, Tmux
from waiting import PATIENCE, wait_for

#: Ends when it is told to.
WAITING = "import pathlib, time\nwhile not pathlib.Path('end').exists():\n    time.sleep(0.01)\n"
#: The alternate screen and the cursor: what is switched at the start, and back at the end.
ENTERED, LEFT, CURSOR_SHOWN = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


@pytest.fixture
def at_terminal(allranks):
    """Start commands in a terminal, which is taken away at the end."""
    with ExitStack() as stack:
        allranks.env["TERM"] = "xterm"
        yield lambda *words: stack.enter_context(closing(Terminal(allranks, *words)))


def _is_restored(terminal: Terminal) -> bool:
    _, entered, rest = terminal.shown.rpartition(ENTERED)
    return bool(entered) and CURSOR_SHOWN in rest and rest.rstrip().endswith(LEFT) and terminal.edits_lines


def test_a_run_is_watched_to_its_end(allranks, at_terminal):
    allranks.script(WAITING)
    run = allranks.popen("run", "train.py", "--nproc-per-node", "2")
    wait_for("its ranks", lambda: [*allranks.folder.glob("runs/latest/attempts/000/node-000/rank-1.out")])
    terminal = at_terminal("watch")
    terminal.read_until("RUNNING")
    (allranks.folder / "end").touch()
    terminal.read_until("SUCCEEDED")
    terminal.read_until("attempt 1 ended")
    terminal.type("q")
    assert terminal.wait() == 0
    assert _is_restored(terminal)
    assert run.wait(PATIENCE) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_list_of_runs_opens_one_and_signals_leave_the_terminal_as_it_was(
    allranks, at_terminal, failed_run: Path, number: int
):
    for name in ("one", "two"):
        shutil.copytree(failed_run, allranks.folder / "runs" / name)
    (allranks.folder / "runs" / "one" / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "loss": 0.5}\n{"step": 2')
    terminal = at_terminal("watch", "one", "two")
    terminal.read_until("1-9 open a run")
    terminal.type("1")
    terminal.read_until("loss")
    terminal.read_until("b back")
    terminal.process.send_signal(number)
    assert terminal.wait() == 128 + number
    assert _is_restored(terminal)
    assert "Traceback (most recent call last):\r\n  File" not in terminal.shown.rpartition(LEFT)[2]


def test_all_runs_are_watched_until_ctrl_c(allranks, at_terminal, failed_run: Path):
    for name in ("one", "two"):
        shutil.copytree(failed_run, allranks.folder / "runs" / name)
    terminal = at_terminal("watch", "--all")
    terminal.read_until("2 runs")
    terminal.type("\x03")
    assert terminal.wait() == 128 + signal.SIGINT
    assert _is_restored(terminal)


def test_200_runs_are_scrolled_through_and_one_is_opened(allranks, tmp_path, failed_run: Path):
    if not shutil.which("tmux"):
        pytest.skip("needs tmux")
    for number in range(200):
        shutil.copytree(failed_run, folder := allranks.folder / "runs" / f"run-{number:03}")
        record = json.loads((folder / "record.json").read_text())
        (folder / "record.json").write_text(json.dumps({**record, "id": folder.name, "created": 1.7e9 + number}))
    with closing(Tmux(allranks, tmp_path / "tmux", (80, 24), "watch", "--all")) as terminal:

        def names(top: int) -> list[str]:
            return [f"run-{number:03}" for number in range(199 - top, 199 - top - 22, -1)]

        def shown() -> list[str]:
            return re.findall(r"run-\d{3}", "\n".join(terminal.screen))

        wait_for("the newest", lambda: shown() == names(0))
        terminal.type("Down", "Down")
        wait_for("two rows further", lambda: shown() == names(2))
        terminal.type("PageDown")
        wait_for("a page further", lambda: shown() == names(24))
        terminal.type(*["PageDown"] * 9)
        wait_for("the oldest", lambda: shown() == names(178))
        assert terminal.screen[0].startswith("200 runs  179 to 200  ")
        terminal.type("PageUp", "Up")
        wait_for("a page and a row back", lambda: shown() == names(155))
        terminal.type("3")
        wait_for("the third of them", lambda: terminal.screen[0].startswith(f"{names(155)[2]}  FAILED"))


#: Logs a metric, says so, and ends when it is told to.
TRAINING = """\
import os, pathlib, time
metrics = pathlib.Path(os.environ["ALLRANKS_RUN_DIR"], "metrics.jsonl")
metrics.write_text('{"step": 20, "time": 1.0, "loss": 0.25, "steps_per_second": 9.5}\\n')
print("logged")
while not pathlib.Path("end").exists():
    time.sleep(0.01)
"""
STATUS = r"step 20  loss 0\.25 [^ ]*▄[^ ]*  9\.5 steps/s"


def test_the_lines_stand_below_the_log_and_go_away(allranks, at_terminal):
    allranks.script(TRAINING)
    terminal = at_terminal("run", "train.py", "--no-check")
    terminal.read_until(r"logged\r\n")
    terminal.read_until(STATUS)
    (allranks.folder / "end").touch()
    terminal.read_until(r"\r\x1b\[J[^\n]*succeeded")
    assert terminal.wait() == 0
    assert not re.search(STATUS, terminal.shown.rpartition("succeeded")[2])
    (run,) = allranks.folder.glob("runs/train-*")
    assert allranks("logs", run.name).stdout == "[0] logged\n"


def test_ctrl_backslash_leaves_nothing_below_the_log(allranks, at_terminal):
    allranks.script(TRAINING)
    terminal = at_terminal("run", "train.py", "--no-check")
    terminal.read_until(STATUS)
    terminal.type("\x1c")
    assert terminal.wait() == -signal.SIGQUIT
    assert terminal.shown.endswith("\r\x1b[J")


def test_plain_draws_nothing_below_the_log_whose_lines_are_the_same(allranks, at_terminal):
    allranks.script(TRAINING)

    def run(*words: str) -> str:
        (allranks.folder / "end").unlink(missing_ok=True)
        terminal = at_terminal("run", "train.py", "--no-check", "--name", "demo", *words)
        terminal.read_until(r"logged\r\n")
        if not words:
            terminal.read_until(STATUS)
        (allranks.folder / "end").touch()
        assert terminal.wait() == 0
        return re.sub(r"demo-[0-9-]+|in [0-9.]+ s", "", terminal.shown)

    drawn, plain = run(), run("--plain")
    # Each message of allranks itself wipes what the terminal may show of a key that was pressed.
    assert plain.replace("\r\x1b[Kallranks: ", "allranks: ").count("\x1b[K") == 0
    assert not re.search(STATUS, plain)
    lines = [line for line in plain.replace("\r\x1b[K", "").split("\r\n") if line]
    shown = [re.sub(r".*\x1b\[[JK]", "", line) for line in drawn.split("\r\n")]
    assert [line for line in shown if line in lines] == lines


def test_enter_leaves_an_empty_row_and_nothing_of_the_lines_below_the_log(allranks, tmp_path):
    if not shutil.which("tmux"):
        pytest.skip("needs tmux")
    allranks.script(TRAINING)
    with closing(Tmux(allranks, tmp_path / "tmux", (80, 12), "run", "train.py", "--no-check")) as terminal:
        wait_for("the lines", lambda: "9.5 steps/s" in "".join(terminal.screen) and "MEM" in "".join(terminal.screen))
        terminal.type("Enter")
        wait_for("the row", lambda: "steps/s" in (terminal.screen[terminal.screen.index("[0] logged") + 3]))
        terminal.type("Enter")
        wait_for("another", lambda: "steps/s" in (terminal.screen[terminal.screen.index("[0] logged") + 4]))
        (allranks.folder / "end").touch()
        wait_for("the end", lambda: "succeeded" in "".join(terminal.screen))
        left = terminal.history.split("\n")
    at = left.index("[0] logged")
    assert left[at + 1 : at + 3] == ["", ""]
    assert re.fullmatch(r"allranks: train-\S+ succeeded in .* s", left[at + 3])


#: Draws a progress bar that is wider than the terminal, in characters of two cells, of none, and of one.
WIDE = """\
import pathlib, time
print("\\r" + "語" * 30 + "\\N{GRINNING FACE}" * 10 + "e\\N{COMBINING ACUTE ACCENT}" * 60, end="", flush=True)
while not pathlib.Path("end").exists():
    time.sleep(0.01)
print("\\rdone")
"""


def test_a_bar_of_wide_characters_is_cut_to_one_line_of_the_terminal(allranks, tmp_path):
    if not shutil.which("tmux"):
        pytest.skip("needs tmux")
    allranks.script(WIDE)
    with closing(Tmux(allranks, tmp_path / "tmux", (40, 10), "run", "train.py", "--no-check")) as terminal:
        shown = wait_for("the bar", lambda: [line for line in terminal.screen if "語" in line])
        (allranks.folder / "end").touch()
        wait_for("the end", lambda: "succeeded" in "".join(terminal.screen))
        left = terminal.screen
    assert shown == ["[0] " + "語" * 17]
    assert "語" not in "".join(left)
    assert "[0] done" in left


#: The lines at the bottom of a terminal, by its columns.
LAYOUTS = {
    30: r"step 20 [^\n]*\n9\.5 steps/s\n[^\n]+$",
    40: r"step 20 [^\n]*9\.5 steps/s\n[^\n]+\nMEM [^\n]+$",
    80: r"step 20 [^\n]*9\.5 steps/s  [^\n]+\nMEM [^\n]+$",
    100: r"step 20 [^\n]*9\.5 steps/s  [^\n]+  MEM [^\n]+$",
}


@pytest.mark.parametrize("columns", [80, 40])
def test_lines_below_the_log_follow_the_size_of_the_terminal_and_leave_nothing(allranks, tmp_path, columns):
    if not shutil.which("tmux"):
        pytest.skip("needs tmux")
    allranks.script(TRAINING)
    with closing(Tmux(allranks, tmp_path / "tmux", (columns, 24), "run", "train.py", "--no-check")) as terminal:

        def is_laid_out(width: int) -> bool:
            return bool(re.search(LAYOUTS[width], "\n".join(terminal.screen)))

        wait_for("the lines", lambda: is_laid_out(columns))
        for width in (30, 100, columns):
            terminal.resize(width, 24)
            # Between two sizes it must have drawn: a terminal moves what it shows before a program can know its size.
            wait_for(f"the lines of {width} columns", lambda width=width: is_laid_out(width))
        (allranks.folder / "end").touch()
        wait_for("the end", lambda: "succeeded" in "".join(terminal.screen))
        left, logged = "".join(terminal.screen), terminal.history.count("[0] logged")
    assert logged == 1
    assert "steps/s" not in left
    assert "MEM" not in left
