"""A failure is noticed at once, told as what it is, and what was printed before it is there."""

from __future__ import annotations

import sys

import pytest

FIRST_FAILS = """\
import os, time
if os.environ["RANK"] == "0":
    os._exit(7)
time.sleep(300)
"""
#: Rank 0 fails once rank 1 is there, and rank 1 does not leave when it is told to.
FAILS_BESIDE_A_DEAF_ONE = """\
import os, signal, sys, time
if os.environ["RANK"] == "0":
    while not os.path.exists("ready"):
        time.sleep(.01)
    sys.exit(7)
signal.signal(signal.SIGTERM, lambda *_: print("told to leave", flush=True))
open("ready", "w").close()
while True:
    signal.pause()
"""
LINES = "".join(f"line {number}\n" for number in range(20000))
FLOOD = "import os, sys\nfor number in range(20000):\n    print('line', number)\n"


def test_a_rank_that_dies_while_others_are_started_is_noticed_at_once(allranks, watch):
    allranks.script(FIRST_FAILS)
    done = allranks("run", "train.py", "--nproc-per-node", "64")  # It takes a while to start so many.
    assert done.rc == 7
    first, *others = watch.events("rank-exited")
    (started,) = watch.events("ranks-started")
    assert (first["rank"], first["code"]) == (0, 7)
    assert {event["code"] for event in others} == {-15}  # They would sleep for 300 s.
    assert first["ended"] < started["time"], "it outlived the start of the others: this test has shown nothing"


def test_ctrl_c_after_a_failure_does_not_hide_the_failure(allranks, watch, finish):
    allranks.script(FAILS_BESIDE_A_DEAF_ONE)
    process = allranks.popen("run", "train.py", "--nproc-per-node", "2")
    watch.line(1, "told to leave")
    process.send_signal(2)
    code, _, err = finish(process)
    status = watch.status()
    assert (code, status["exit_code"], status["state"], status["rank"]) == (7, 7, "FAILED", 0)
    assert status["reason"] == "rank 0 exited with code 7"
    assert "\nerror: rank 0 exited with code 7\n" in err
    assert [(event["rank"], event["code"]) for event in watch.events("rank-exited")] == [(0, 7), (1, -2)]
    (asked,) = watch.events("stop-requested")
    assert (asked["signal"], asked["by"]) == ("SIGINT", "got SIGINT")
    watch.nothing_left()


@pytest.mark.parametrize("warm", ["--warm", "--no-warm"])
@pytest.mark.parametrize("kind", ["OSError", "RuntimeError", "ImportError"])
def test_a_broken_torch_is_named(allranks, watch, warm, kind):
    torch = allranks.folder / "site" / "torch"
    torch.mkdir(parents=True)
    why = "libcudart.so.12: cannot open shared object file"
    (torch / "__init__.py").write_text(f"raise {kind}({why!r})\n")
    allranks.script("print('never', flush=True)\nimport torch\n")
    done = allranks("run", "train.py", warm, PYTHONPATH=str(torch.parent))
    fix = "install torch there, or name the environment that has it: environment.venv, .conda or .python"
    assert (done.rc, done.stdout) == (1, "")
    assert f"\nerror: {sys.executable} cannot import torch\n  why: {why}\n  fix: {fix}\n" in done.stderr
    status = watch.status()
    assert (status["state"], status["exit_code"]) == ("FAILED", 1)
    assert status["reason"] == f"{sys.executable} cannot import torch"
    watch.nothing_left()


def test_a_flood_that_was_flushed_is_there_whatever_ends_the_rank(allranks, watch):
    allranks.script(FLOOD + "sys.stdout.flush()\nos._exit(0)\n")
    done = allranks("run", "train.py")
    assert done.rc == 0
    assert (watch.node / "rank-0.out").read_text() == LINES
    assert done.stdout == LINES.replace("line", "[0] line")


def test_a_fork_after_a_flood_doubles_no_line(allranks, watch):
    end = "if os.fork() == 0:\n    print('child')\n    sys.exit()\nos.wait()\nprint('parent')\n"
    allranks.script(FLOOD + end)
    assert allranks("run", "train.py").rc == 0
    assert (watch.node / "rank-0.out").read_text() == LINES + "child\nparent\n"
