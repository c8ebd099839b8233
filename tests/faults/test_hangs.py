"""A run in which no rank advances is noticed, explained, and ended or restarted if that is asked for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from waiting import PATIENCE

#: Rank 1 does what the test is about, in ``work``; the others wait for it.
SCRIPT = """\
import os, signal, threading, time
def wait():
    while not os.path.exists("go"):
        time.sleep(0.01)
def work():
    {work}
print("up", flush=True)
work() if os.environ["RANK"] == "1" else wait()
print("done")
"""
SPIN = "n = 0\n    while not os.path.exists('go'): n += 1"
LOCK = "lock = threading.Lock(); lock.acquire(); lock.acquire()"
#: What rank 1 does, and what is said of it.
PLACES = {
    "sleeps": ("time.sleep(600)", "rank 1 is in work at train.py:6", "hang"),
    "loops": (SPIN, "rank 1 is in work at train.py:7", "hang"),
    "waits for a lock": (LOCK, "rank 1 is in work at train.py:6", "hang"),
    "hangs at exit": (
        "threading.Thread(target=time.sleep, args=(600,)).start(); raise SystemExit",
        "rank 1 is at the exit of the interpreter",
        "hang-at-exit",
    ),
    "is stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 is stopped (SIGSTOP)", "hang-stopped"),
    # Until its child has opened the pipe, and so started the program, the kernel lets only SIGKILL through.
    "waits in the kernel": (
        "os.mkfifo('gate'); os.posix_spawn('/bin/true', ['true'], {}, "
        "file_actions=[(os.POSIX_SPAWN_OPEN, 9, 'gate', os.O_RDONLY, 0)])",
        "rank 1 waits for a disk or file server",
        "hang-in-kernel",
    ),
    "has left": ("raise SystemExit", "rank 1 exited without an error", "hang"),
}
#: Ranks wait for each other, each for the broadcast of another one.
MISMATCH = """\
import torch
from torch import distributed
distributed.init_process_group("gloo")
rank, tensor = distributed.get_rank(), torch.ones(1)
distributed.barrier()
if rank == 0:
    distributed.broadcast(tensor, 1)
else:
    distributed.broadcast(tensor, 0)
"""
#: Rank 0 is in another collective than the others.
DIFFERS = """\
import torch
from torch import distributed
distributed.init_process_group("gloo")
distributed.barrier()
if distributed.get_rank() == 0:
    distributed.all_gather([torch.ones(3)] * 3, torch.ones(3))
else:
    distributed.all_reduce(torch.ones(300_000))
"""
#: Rank 2 leaves a collective out, and waits somewhere else.
SKIPS = """\
import time, torch
from torch import distributed
distributed.init_process_group("gloo")
def load():
    time.sleep(600)
if distributed.get_rank() == 2:
    load()
for _ in range(2):
    distributed.all_reduce(torch.ones(300_000))
"""
NOTICE = "no rank has advanced for "


def notices(err: str) -> list[str]:
    """Return where the ranks stood, as each notice of a hang says it."""
    return [line.split(NOTICE, 1)[1].split(": ", 1)[1] for line in err.splitlines() if NOTICE in line]


def ended(allranks: Any, ranks: int = 2, *more: str) -> tuple[Any, dict[str, Any]]:
    """Run until a hang ends the run; return how it ended, and the verdict."""
    flags = ("--hang-timeout", "1", "--on-hang", "end", "--stop-timeout", "1")  # Not all of them take SIGTERM.
    done = allranks("run", "train.py", "--nproc-per-node", str(ranks), *flags, *more)
    return done, json.loads(allranks("why", "--json").stdout)["diagnosis"]


@pytest.mark.parametrize("name", PLACES)
def test_the_rank_that_others_wait_for_is_named(name: str, allranks: Any) -> None:
    work, place, kind = PLACES[name]
    allranks.script(SCRIPT.format(work=work))
    done, verdict = ended(allranks)
    others = f"{place}; the run ends"
    assert done.rc == 1
    assert [notice.split("; ", 1)[1] for notice in notices(done.stderr)] == [others]
    assert notices(done.stderr)[0].startswith("rank 0 is in wait at train.py:")
    assert "the ranks hang: none has advanced for" in done.stderr
    assert verdict["id"] == kind
    assert place in verdict["cause"]
    if name == "is stopped":  # It is woken, so that it can save: SIGTERM has ended it, not SIGKILL.
        events = (allranks.run() / "attempts" / "000" / "node-000" / "agent.jsonl").read_text().splitlines()
        exits = {event["rank"]: event["code"] for event in map(json.loads, events) if event["kind"] == "rank-exited"}
        assert exits == {0: -signal.SIGTERM, 1: -signal.SIGTERM}


def test_a_rank_in_a_debugger(allranks: Any) -> None:
    allranks.script(SCRIPT.format(work="breakpoint()"))
    command = ("run", "train.py", "--nproc-per-node", "2", "--hang-timeout", "1", "--on-hang", "end", "--stdin", "1")
    words = [sys.executable, "-m", "allranks", *command, "--no-check"]
    pipe = subprocess.PIPE  # Open, and nothing comes: the debugger waits.
    with subprocess.Popen(
        words, cwd=allranks.folder, env=allranks.env, stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        process.wait(PATIENCE)
        out, err = (stream.read().decode() for stream in (process.stdout, process.stderr) if stream)
    assert "(Pdb)" in out
    assert [notice.split("; ", 1)[1] for notice in notices(err)] == [
        "rank 1 is in a debugger at train.py:6; the run ends"
    ]
    verdict = json.loads(allranks("why", "--json").stdout)["diagnosis"]
    assert (verdict["id"], verdict["rank"], verdict["sure"]) == ("hang-in-debugger", 1, "certain")


def test_all_ranks_hang_at_the_start(allranks: Any) -> None:
    allranks.script("import time\ndef prepare():\n    time.sleep(600)\nprepare()\n")
    done, verdict = ended(allranks, 3)
    assert notices(done.stderr) == ["ranks 0-2 are in prepare at train.py:3; the run ends"]
    assert (verdict["id"], verdict["rank"], verdict["sure"]) == ("hang", None, "likely")


def test_ranks_in_different_collectives(allranks: Any) -> None:
    """It takes more than 10 s: the agents of two runs import torch, and each hang must be noticed."""
    for script, ranks, said in (
        (
            MISMATCH,
            2,
            "rank 0 waits in broadcast #2 (4 B) at train.py:7; rank 1 waits in broadcast #2 (4 B) at train.py:9",
        ),
        (
            DIFFERS,
            3,
            "ranks 1-2 wait in all_reduce #2 (1.2 MB) at train.py:8; "
            "rank 0 waits in all_gather #2 (12 B) at train.py:6",
        ),
    ):
        allranks.script(script)
        done, verdict = ended(allranks, ranks)
        assert notices(done.stderr) == [f"{said}; they are in different collectives; the run ends"]
        assert (verdict["id"], verdict["retry"]) == ("hang-mismatch", "never")


def test_a_rank_that_leaves_a_collective_out(allranks: Any) -> None:
    allranks.script(SKIPS)
    done, verdict = ended(allranks, 3)
    place = "ranks 0-1 wait in all_reduce #1 (1.2 MB) at train.py:9; rank 2 is in load at train.py:5"
    assert notices(done.stderr) == [f"{place}; the run ends"]
    assert (verdict["id"], verdict["rank"]) == ("hang", 2)
    assert f"why: {place}" in done.stderr


def test_ranks_without_stacks_are_reported_as_such(allranks: Any) -> None:
    allranks.script("import time\ntime.sleep(600)\n")
    done, _ = ended(allranks, 2, "--no-warm")
    assert notices(done.stderr) == ["ranks 0-1 cannot show where they stand; the run ends"]


def test_a_hang_is_reported_wherever_the_run_is_looked_at_and_the_training_goes_on(
    allranks: Any, watch: Any, finish: Any
) -> None:
    allranks.script(SCRIPT.format(work="wait()"))
    process = allranks.popen("run", "train.py", "--nproc-per-node", "2", "--hang-timeout", "1")
    hang = watch.event("hang")
    assert (hang["action"], hang["left"], [group["ranks"] for group in hang["groups"]]) == ("report", [], [[0], [1]])
    verdict = json.loads(allranks("why", "--json").stdout)["diagnosis"]
    assert verdict["id"] == "hang"
    follower = allranks.popen("logs", "-f")
    wait = "; rank 1 is in wait at train.py:"
    assert NOTICE in (line := follower.stderr.readline().decode())
    assert wait in line
    (allranks.folder / "go").touch()
    code, out, err = finish(process)
    assert (code, out.count("[0-1] done")) == (0, 1)
    assert [wait in notice for notice in notices(err)] == [True]
    assert err.count("the ranks advance again") <= 1  # They may have succeeded first.
    assert finish(follower)[0] == 0
    assert json.loads(allranks("why", "--json").stdout)["diagnosis"] is None


def test_status_and_top_say_for_how_long_no_rank_has_advanced(allranks: Any, watch: Any, finish: Any) -> None:
    """It takes the 6 s (a minute without ``_ALLRANKS_WAITS``) after which a run without progress is shown as such."""
    allranks.script(SCRIPT.format(work="wait()"))
    process = allranks.popen("run", "train.py", "--nproc-per-node", "2", "--hang-timeout", "6")
    watch.event("hang")
    progress = next(line for line in allranks("status").stdout.splitlines() if line.startswith("progress"))
    assert progress.split(": ")[0].split(" for ")[0] == "progress  no step"
    assert "rank 1 is in wait at train.py:" in progress
    assert allranks("top").stdout.splitlines()[-1].startswith("no step for ")
    (allranks.folder / "go").touch()
    assert finish(process)[0] == 0


def test_ranks_that_advance_again_are_reported_so(allranks: Any, watch: Any, finish: Any) -> None:
    allranks.script(
        "import os, time\n"
        "for name in ('go', 'stop'):\n"
        "    while not os.path.exists(name):\n"
        "        time.sleep(0.01)\n"
        "    print(name, flush=True)\n"
    )
    process = allranks.popen("run", "train.py", "--hang-timeout", "1")
    watch.event("hang")
    (allranks.folder / "go").touch()
    watch.event("hang-over")
    (allranks.folder / "stop").touch()
    code, _, err = finish(process)
    assert (code, err.count("the ranks advance again")) == (0, 1)


def test_a_hang_restarts_the_ranks(allranks: Any, watch: Any) -> None:
    allranks.script(
        "import os, pathlib, time\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1':\n"
        "    time.sleep(600)\n"
        "print('done')\n"
    )
    command = ("run", "train.py", "--nproc-per-node", "2", "--hang-timeout", "1", "--on-hang", "restart")
    done = allranks(*command, "--max-restarts", "1")
    assert (done.rc, done.stdout.count("done")) == (0, 2)
    assert notices(done.stderr) == ["rank 1 is at train.py:3; rank 0 exited without an error; all ranks restart"]
    assert [event["because_of_rank"] for event in watch.events("restart")] == [None]
    done = allranks(*command)
    assert done.rc == 1  # No restart is left.
    assert "the ranks hang: none has advanced for" in done.stderr


#: For 5 s: output, steps of the runtime, or neither, but all ranks do one thing and another.
ADVANCE = {
    "output": "for n in range(25): print(n, flush=True); time.sleep(0.2)",
    "steps": "import allranks\nctx = allranks.init('gloo')\nfor _ in range(25):\n    step(ctx); time.sleep(0.2)",
    "silence": "while time.monotonic() < began + 5: deep(random.randrange(40))",
}


@pytest.mark.parametrize("name", ADVANCE)
def test_a_run_that_advances_is_not_reported(name: str, allranks: Any, watch: Any) -> None:
    """It takes 5 s: five times the timeout, so that a run that hung would be reported."""
    allranks.script(
        "import os, random, time\n"
        "began = time.monotonic()\n"
        "def deep(n):\n    deep(n - 1) if n else time.sleep(0.03)\n"
        "def step(ctx):\n    list(ctx.evaluation_loader([1, 2], batch_size=1, workers=0))\n" + ADVANCE[name] + "\n"
    )
    done = allranks("run", "train.py", "--nproc-per-node", "2", "--hang-timeout", "1", "--on-hang", "end")
    assert (done.rc, notices(done.stderr), watch.events("hang")) == (0, [], [])


def test_off_watches_nothing(allranks: Any, watch: Any) -> None:
    """It takes 4 s, in which a timeout of one second would have been noticed."""
    allranks.script("import time\ntime.sleep(4)\n")
    assert allranks("run", "train.py", "--hang-timeout", "off", "--on-hang", "end").rc == 0
    assert watch.events("hang") == []
