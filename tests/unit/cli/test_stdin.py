"""A script that reads stdin or calls breakpoint(): one rank does as under python; of several, the one that is named."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from terminals import Terminal
from waiting import PATIENCE

ASKS = 'name = input("name? ")\nprint("hello", name)\nbreakpoint()\nx = 1\nprint("x is", x)\n'
NOTE = "allranks: note: breakpoint() stops only the rank that --stdin names; the others continue"
FIX = "allranks run --stdin 0 gives rank 0 the terminal, and only it may read; so does a run of one rank, not detached"


def piped(allranks: Any, text: str, *args: str) -> tuple[int, str, str]:
    """Run a command with a pipe as its stdin; return its exit code, stdout and stderr."""
    command = [sys.executable, "-m", "allranks", "run", "--no-check", "train.py", *args]
    done = subprocess.run(
        command, cwd=allranks.folder, env=allranks.env, input=text, text=True, capture_output=True, timeout=PATIENCE
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def terminal(allranks: Any) -> Iterator[Callable[..., Terminal]]:
    """Start ``allranks run train.py`` in a terminal."""
    allranks.env.update(TERM="xterm", NO_COLOR="1")
    started: list[Terminal] = []

    def start(*args: str) -> Terminal:
        started.append(Terminal(allranks, "run", "--no-check", "train.py", *args))
        return started[-1]

    yield start
    for each in started:
        each.close()
        each.process.wait(PATIENCE)


@pytest.mark.parametrize("how", ["--warm", "--no-warm"])
def test_one_rank_reads_what_is_piped_in(allranks, how):
    allranks.script("import sys\nprint([input(), sys.stdin.readline(), *sys.stdin])")
    assert piped(allranks, "1\n2\n3\n4", how)[:2] == (0, "[0] ['1', '2\\n', '3\\n', '4']\n")


def test_what_a_script_does_not_read_is_left_for_others(allranks):
    allranks.script("")
    line = "for _ in 1 2; do python -m allranks run --no-check train.py; done; read -r left; echo $left"
    python = f'python() {{ {sys.executable} "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-c", python + line], cwd=allranks.folder, env=allranks.env, input=b"mine\n", capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, b"mine\n")


def test_pdb_works_in_a_terminal_with_one_rank(allranks, terminal):
    allranks.script(ASKS)
    shown = terminal()
    shown.read_until(r"\[0\] name\? $", 60)
    shown.type("bob\n")
    shown.read_until(r"\n\[0\] -> x = 1\r\n", 60)
    shown.read_until(r"\[0\] \(Pdb\) $", 60)
    shown.type("p name\n")
    shown.read_until(r"\[0\] 'bob'\r\n", 60)
    shown.read_until(r"\[0\] \(Pdb\) $", 60)
    shown.type("c\n")
    shown.read_until("succeeded", 60)
    assert shown.wait() == 0
    # No prompt stands before what was written next, on the screen and in the log.
    lines = [line.rpartition("\x1b[K")[2] for line in shown.shown.split("\r\n")]
    assert [line for line in lines if re.match(r"\[0\] (hello|'bob'|x is)", line)] == [
        "[0] hello bob",
        "[0] 'bob'",
        "[0] x is 1",
    ]
    log = (allranks.run() / "attempts/000/node-000/rank-0.out").read_text().splitlines()
    assert [log[0], log[1], *log[-4:]] == ["name? ", "hello bob", "(Pdb) ", "'bob'", "(Pdb) ", "x is 1"]


def test_half_a_line_of_a_script_stays_on_the_screen(allranks, terminal):
    wait = "while not os.path.exists('go'):\n    time.sleep(0.01)\n"
    allranks.script(f"import os, time\nprint('half', end='', flush=True)\n{wait}print()\ninput('more? ')\n")
    shown = terminal()
    shown.read_until(r"\[0\] half\x1b|\[0\] half$", 60)
    (allranks.folder / "go").touch()
    shown.read_until(r"\[0\] half\r\n", 60)
    shown.read_until(r"\[0\] more\? $", 60)
    shown.type("\n")
    assert shown.wait() == 0


def test_the_rank_that_is_named_has_the_terminal(allranks, terminal):
    allranks.script("import os\nbreakpoint()\nprint('after', os.environ['RANK'])\n")
    shown = terminal("--nproc-per-node", "3", "--stdin", "1")
    shown.read_until(r"\[1\] \(Pdb\) $", 60)
    shown.type("p os.environ['RANK']\n")
    shown.read_until(r"\[1\] '1'\r\n", 60)
    shown.type("c\n")
    shown.read_until("after 1", 60)
    assert shown.wait() == 0
    assert NOTE in shown.shown
    assert {f"after {rank}" for rank in range(3)} == set(re.findall(r"after \d", shown.shown))


def test_ctrl_c_at_a_prompt_asks_the_run_to_stop(allranks, terminal):
    allranks.script("input('name? ')")
    shown = terminal()
    shown.read_until(r"\[0\] name\? $", 60)
    shown.type("\x03")
    shown.read_until(r"SIGINT: the ranks have 30 s to save and exit", 60)
    assert shown.wait() == 128 + signal.SIGINT


@pytest.mark.parametrize("how", ["--warm", "--no-warm"])
def test_breakpoint_on_several_ranks_says_once_what_to_do(allranks, how):
    allranks.script("breakpoint()")
    result = allranks("run", "train.py", "--nproc-per-node", "2", how)
    what = "breakpoint() needs a terminal, and no rank of this run has one"
    assert result.rc == 1
    assert f"  why: {what}\n" in result.stderr
    assert f"  fix: {FIX}\n" in result.stderr
    assert "pdb" not in result.stderr
    # Whether the ranks' tracebacks are shown as one depends on when they were written.
    logs = [log.read_text() for log in allranks.run().glob("attempts/000/node-000/rank-*.err")]
    assert max(log.count("Traceback") for log in logs) == 1


def test_a_users_own_debugger_stays(allranks):
    allranks.script("breakpoint()")
    assert allranks("run", "train.py", "--nproc-per-node", "2", PYTHONBREAKPOINT="0").rc == 0


def test_a_rank_that_stdin_does_not_name_is_told_to_leave_reading_to_the_other(allranks):
    allranks.script("input()")
    code, _, said = piped(allranks, "text\n", "--nproc-per-node", "2", "--stdin", "0")
    assert code == 1
    assert "why: --stdin gives it to rank 0 alone\n" in said
    assert '  fix: read it on that rank only: if os.environ["RANK"] == "0": ...\n' in said


@pytest.mark.parametrize("reads", ["input()", "sys.stdin.read()", "sys.stdin.readline()", "next(sys.stdin)"])
def test_reading_on_several_ranks_says_what_to_do(allranks, reads):
    allranks.script(f"import sys\n{reads}")
    code, _, said = piped(allranks, "text\n", "--nproc-per-node", "2")
    assert code == 1
    assert "  why: the script reads stdin, which this rank does not have\n" in said
    assert "why: ranks cannot share the stdin of allranks run\n" in said
    assert f"  fix: {FIX}\n" in said


def test_input_in_plain_interpreters_says_what_to_do(allranks):
    allranks.script("input()")
    code, _, said = piped(allranks, "text\n", "--nproc-per-node", "2", "--no-warm")
    assert code == 1
    assert "  why: EOFError: EOF when reading a line (train.py:1)\n" in said
    assert re.search(r"  fix: allranks run --stdin [01] gives this rank the terminal\n", said)


def test_taking_all_of_an_empty_stdin_gives_nothing(allranks):
    """So a script that takes what is piped into it runs without, as in a scheduler's job."""
    allranks.script("import sys\nprint([sys.stdin.read()])")
    result = allranks("run", "train.py", "--nproc-per-node", "2")
    assert (result.rc, result.by_rank) == (0, {0: ["['']"], 1: ["['']"]})


def test_a_script_that_expects_no_input_does_as_before(allranks):
    allranks.script("try:\n    input('sure? ')\nexcept EOFError:\n    print('not asked')")
    code, shown, _ = piped(allranks, "", "--nproc-per-node", "2")
    # Equal lines are folded if they were written at about the same time.
    folded, apart = ["[0-1] sure? not asked"], ["[0] sure? not asked", "[1] sure? not asked"]
    assert code == 0
    assert sorted(shown.splitlines()) in (folded, apart)


def test_a_detached_run_has_no_stdin(allranks):
    allranks.script("input()")
    run = allranks("run", "-d", "train.py").stdout.strip()
    logs = allranks("logs", "-f", run)
    assert "allranks.errors.StdinError: the script reads stdin, which this rank does not have" in logs.stderr
    assert "why: the run has none" in logs.stderr
