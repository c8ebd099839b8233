"""Restarts: each generation gets a store of its own, and comes up whatever the one before died of."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from waiting import PATIENCE

TRAIN = """\
import os, sys, torch, torch.distributed as dist
generation, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
print("old key", store.check(["mine"]), flush=True)
dist.barrier()
store.set("mine", str(generation))
total = torch.ones(1)
dist.all_reduce(total)
print("generation", generation, "sum", int(total), "port", os.environ["MASTER_PORT"],
      "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
dist.barrier()
FAIL
dist.barrier()  # Hangs while the other one dies.
dist.destroy_process_group()
"""


def _script(failure: str, until: int, who: str = "1") -> str:
    fail = f"if generation < {until} and rank == {who}:\n    {failure}"
    return TRAIN.replace("FAIL", fail)


@pytest.mark.smoke
@pytest.mark.parametrize("warm", ["--warm", "--no-warm"])
def test_a_generation_that_lost_a_rank_is_followed_by_a_whole_one(allranks, watch, warm):
    """One rank is killed, and the next one leaves on its own.

    It takes more than 10 s: each plain rank of the three generations imports torch.
    """
    allranks.script(_script("os._exit(6) if generation else os.kill(os.getpid(), 9)", 2))
    options = ("--max-restarts", "3", "--restart-delay", "0", warm)
    done = allranks("run", "train.py", "--nproc-per-node", "2", *options, timeout=PATIENCE)
    assert (done.rc, watch.status()["restarts"]) == (0, 2)
    ports = [event["master_port"] for event in watch.events("ranks-started")]
    for number, rank in enumerate(("0", "1")):
        said = (watch.node / f"rank-{rank}.out").read_text()
        assert said == "".join(f"old key False\ngeneration {n} sum 2 port {ports[n]} of 3\n" for n in range(3)), number
    exits = watch.exits()
    assert (exits[0], exits[2]) == ((1, -9), (1, 6))
    assert sorted(exits[4:]) == [(0, 0), (1, 0)]
    told = [(event["restart"], event["delay"], event["because_of_rank"]) for event in watch.events("restart")]
    assert told == [(1, 0.0, 1), (2, 0.0, 1)]
    watch.nothing_left()


IN_ITS_OWN_WORDS = """\
import os, sys
generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
if generation == "0":
    sys.exit(5)
if generation == "1":
    raise ValueError
if generation == "2":
    sys.exit("x")
"""


def test_a_rank_that_fails_in_its_own_words_is_started_anew_and_later_each_time(allranks, watch):
    allranks.script(IN_ITS_OWN_WORDS)
    assert allranks("run", "train.py", "--max-restarts", "3").rc == 0
    assert [event["code"] for event in watch.events("rank-exited")] == [5, 1, 1, 0]
    assert [event["delay"] for event in watch.events("restart")] == [0.0, 1.0, 2.0]
    assert watch.status()["restarts"] == 3


def test_with_a_fixed_port_no_old_key_is_found(allranks, watch, free_port):
    allranks.script(_script("os._exit(1)", 5, "generation % 2"))
    port = str(free_port)
    options = ("--max-restarts", "5", "--restart-delay", "0", "--master-port", port)
    done = allranks("run", "train.py", "--nproc-per-node", "2", *options)
    assert done.rc == 0
    assert [event["master_port"] for event in watch.events("ranks-started")] == [int(port)] * 6
    assert (watch.node / "rank-0.out").read_text().count("old key False\n") == 6
    assert "old key True" not in (watch.node / "rank-0.out").read_text()


@pytest.fixture
def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_hundred_restarts_of_a_hundred_succeed(allranks, watch):
    """It takes more than 10 s: a hundred process groups meet."""
    allranks.script(_script("os.kill(os.getpid(), 9)", 100, "generation % 2"))
    options = ("--max-restarts", "100", "--restart-delay", "0")
    done = allranks("run", "train.py", "--nproc-per-node", "2", *options, timeout=PATIENCE)
    assert (done.rc, watch.status()["restarts"]) == (0, 100)
    assert [event["delay"] for event in watch.events("restart")] == [0.0] * 100
    said = [line.split()[:4] for line in (watch.node / "rank-0.out").read_text().splitlines() if "sum" in line]
    assert said == [["generation", str(number), "sum", "2"] for number in range(101)]


def test_no_more_restarts_than_allowed(allranks, watch):
    allranks.script("import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(7)\ntime.sleep(300)\n")
    done = allranks("run", "train.py", "--nproc-per-node", "2", "--max-restarts", "2", "--restart-delay", "0")
    status = watch.status()
    assert (done.rc, status["state"], status["restarts"], status["rank"]) == (7, "FAILED", 2, 1)
    assert status["reason"] == "rank 1 exited with code 7"
    assert len(watch.events("ranks-started")) == 3
    assert "rank 1 exited with code 7" in done.stderr


def test_each_failure_in_a_row_waits_twice_as_long(allranks, watch):
    allranks.script("import sys; sys.exit(1)")
    done = allranks("run", "train.py", "--max-restarts", "5", "--restart-delay", "0.1")
    assert done.rc == 1
    restarts, exits = watch.events("restart"), watch.events("rank-exited")
    assert [event["delay"] for event in restarts] == [0.0, 0.1, 0.2, 0.4, 0.8]
    starts = watch.events("ranks-started")
    for number, restart in enumerate(restarts):
        assert starts[number + 1]["time"] - exits[number]["ended"] >= restart["delay"]


def test_a_rank_that_ignores_sigterm_does_not_hold_up_a_restart_for_ever(allranks, watch):
    allranks.script(
        "import os, signal, sys, time\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    if os.environ['RANK'] == '1':\n"
        "        while not os.path.exists('ready'): time.sleep(.01)\n"
        "        sys.exit(1)\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    open('ready', 'w')\n"
        "    time.sleep(300)\n"
    )
    done = allranks("run", "train.py", "--nproc-per-node", "2", "--max-restarts", "1", "--stop-timeout", "1")
    assert done.rc == 0
    exits = [(event["rank"], event["code"]) for event in watch.events("rank-exited")]
    assert exits[:2] == [(1, 1), (0, -9)]


def test_what_a_rank_left_behind_does_not_outlive_its_generation(allranks, watch):
    allranks.script(
        "import os, sys, time\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        time.sleep(300)\n"
        "    print(pid, file=open('child.tmp', 'w')); os.rename('child.tmp', 'child')\n"
        "    sys.exit(1)\n"
        "print('up', flush=True)\n"
        "time.sleep(300)\n"
    )
    process = allranks.popen("run", "train.py", "--max-restarts", "1")
    child = watch.pid_file("child")
    watch.line(0, "up")
    assert not Path(f"/proc/{child}").exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 143
    watch.nothing_left()
