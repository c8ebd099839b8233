"""``allranks stacks`` shows where living ranks stand, and disturbs none of them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from allranks import contract
from allranks.agent.stacks import StackRequests
from allranks.record.stacks import Collective, Frame, RankStack, groups, parse
from exact_runs import command, undisturbed, weights_in
from waiting import wait_for

#: Rank 1 loads, the others wait for it; all go on when ``go`` is there.
STANDS = """\
import os, time
def wait():
    while not os.path.exists("go"):
        time.sleep(0.01)
def load():
    wait()
def gather():
    wait()
print("up", flush=True)
load() if os.environ["RANK"] == "1" else gather()
print("done", sum(n * n for n in range(1000)))
"""


def all_up(watch: Any, count: int) -> None:
    for rank in range(count):
        watch.line(rank, "up")


def test_ranks_are_grouped_by_where_they_stand(allranks: Any, watch: Any, finish: Any) -> None:
    script = allranks.script(STANDS)
    process = allranks.popen("run", "train.py", "--nproc-per-node", "4")
    all_up(watch, 4)
    done = allranks("stacks")
    note = "ranks that advance are at different lines too: call it again to see which of them stand still"
    assert (done.rc, done.stderr) == (0, f"allranks: note: {note}\n")
    assert [line for line in done.stdout.splitlines() if " in wait" not in line] == [
        "rank 1",
        f"  {script}:6 in load",
        f"  {script}:10 in <module>",
        "ranks 0,2-3",
        f"  {script}:8 in gather",
        f"  {script}:10 in <module>",
    ]
    for _ in range(3):
        found = json.loads(allranks("stacks", "--json").stdout)
        assert [each["rank"] for each in found["ranks"]] == [0, 1, 2, 3]
        assert [each["frames"][-1]["function"] for each in found["ranks"]] == ["<module>"] * 4
        assert (found["silent"], found["without"]) == ([], [])
    (allranks.folder / "go").touch()
    code, out, _ = finish(process)
    assert (code, out.count("done 332833500")) == (0, 1)
    again = allranks("stacks")
    assert (again.rc, again.stderr.split("\n")[1]) == (2, "  why: only living ranks have stacks")


def test_stacks_of_ranks_that_were_restarted(allranks: Any, watch: Any, finish: Any) -> None:
    allranks.script(STANDS)
    process = allranks.popen("run", "train.py", "--nproc-per-node", "2", "--max-restarts", "1")
    all_up(watch, 2)
    os.kill(watch.event("ranks-started")["ranks"][0]["pid"], signal.SIGKILL)
    logs = [watch.node / f"rank-{rank}.out" for rank in range(2)]
    wait_for("both to be up again", lambda: all(log.read_text().count("up\n") == 2 for log in logs))
    found = json.loads(allranks("stacks", "--json").stdout)
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    (allranks.folder / "go").touch()
    assert finish(process)[0] == 0


def test_ranks_that_cannot_show_stacks_are_named_and_live_on(allranks: Any, watch: Any, finish: Any) -> None:
    allranks.script(STANDS)
    process = allranks.popen("run", "train.py", "--nproc-per-node", "2", "--no-warm")
    all_up(watch, 2)
    done = allranks("stacks")
    note = "allranks: note: ranks 0-1 run in an interpreter of their own: use py-spy dump --pid PID\n"
    assert (done.rc, done.stderr) == (1, note)
    (allranks.folder / "go").touch()
    assert finish(process)[0] == 0


def test_an_agent_that_does_not_answer_is_named(allranks: Any, watch: Any) -> None:
    allranks.script(STANDS)
    allranks("run", "train.py", "--detach")
    all_up(watch, 1)
    os.kill(watch.agent(), signal.SIGSTOP)
    done = allranks("stacks", "--timeout", "1")
    os.kill(watch.agent(), signal.SIGCONT)
    note = "allranks: note: nodes 0 did not answer within 1 s, or do not see this run's directory\n"
    assert (done.rc, done.stdout.strip(), done.stderr) == (1, "", note)
    (allranks.folder / "go").touch()


def test_a_stopped_rank_is_named(allranks: Any, watch: Any, finish: Any) -> None:
    allranks.script(STANDS)
    process = allranks.popen("run", "train.py", "--nproc-per-node", "2")
    all_up(watch, 2)
    pid = watch.event("ranks-started")["ranks"][1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    done = allranks("stacks")
    os.kill(pid, signal.SIGCONT)
    note = "allranks: note: rank 1 did not react: stopped (SIGSTOP); kill -CONT PID lets it continue\n"
    assert (done.rc, done.stdout.splitlines()[0], done.stderr) == (0, "rank 0", note)
    (allranks.folder / "go").touch()
    assert finish(process)[0] == 0


def test_a_training_whose_stacks_are_taken_ends_with_the_weights_of_one_left_alone(
    allranks: Any, watch: Any, finish: Any
) -> None:
    """It takes more than 10 s: a training of two ranks, and once for all the undisturbed one."""
    options = ("--epochs", "30")
    whole = undisturbed(allranks, *options)
    process = allranks.popen(*command("seen", *options, "--slow-until", "go", "--pause", "0.1"))
    watch.line(1, "epoch 0 ")
    for _ in range(10):
        found = json.loads(allranks("stacks", "--json").stdout)
        assert ([each["rank"] for each in found["ranks"]], found["silent"]) == ([0, 1], [])
    (allranks.folder / "go").touch()
    code, out, err = finish(process)
    assert (code, weights_in(out)) == (0, whole), err


def test_a_request_is_answered_that_was_there_before_the_agent(tmp_path: Path) -> None:
    node = tmp_path / "node-001"
    node.mkdir()
    (tmp_path / contract.STACKS_REQUEST).touch()
    requests, pid = StackRequests(node, 0o600), os.getpid()
    answer = node / contract.STACKS

    def answered() -> bool:
        requests.tick(lambda: [pid])
        return answer.exists()

    wait_for("an answer", answered)
    found = json.loads(answer.read_text())
    assert found["request"] == (tmp_path / contract.STACKS_REQUEST).stat().st_mtime_ns
    assert found["pids"] == {str(pid): {"stack": False, "recorder": False, "state": ""}}  # It has no such handler.


@pytest.mark.parametrize(
    "header",
    [f"{name} (most recent call first):" for name in ("Stack", "Current thread 0x7f01", "Current thread 0x7f01 [a]")],
)
def test_what_faulthandler_writes_is_read(header: str) -> None:
    dump = f"""\
Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 355 in wait

{header}
  File "/home/me/it's train.py", line 41 in load
  File "/home/me/it's train.py", line 88 in <module>
  File "/run/code/allranks/agent/workers/rank.py", line 35 in run_as_main
  File "/run/code/allranks/agent/main.py", line 65 in main
"""
    found = parse(dump, 3, 1)
    assert found
    file = "/home/me/it's train.py"
    assert found.frames == (Frame(file, 41, "load"), Frame(file, 88, "<module>"))
    assert (found.rank, found.node, found.collective) == (3, 1, None)
    none, same = parse(f"{header}\n  <no Python frame>\n", 5, 1), parse(dump, 4, 1)
    assert none == RankStack(5, 1, ())
    assert same
    assert groups((found, same, none)) == [([5], none), ([3, 4], found)]
    assert parse("", 5, 1) is None


def test_what_the_flight_recorder_adds_is_read() -> None:
    stack = "Stack (most recent call first):\n"
    line = 'Collective: {"name": "all_reduce", "number": 12, "bytes": 4, "group": "0"}'
    collective = Collective("all_reduce", 12, 4, "0")
    assert parse(f"{stack}\n{line}\n", 3, 1) == RankStack(3, 1, (), collective)
    assert parse(f"{stack}\n{line}\n{stack}\nCollective: null\n", 3, 1) == RankStack(3, 1, ())
    assert parse(f"{stack}\n{line}\n{stack}\n{line[:-5]}", 3, 1) == RankStack(3, 1, (), collective)
    assert parse(f"\n{line}\n", 3, 1) is None
