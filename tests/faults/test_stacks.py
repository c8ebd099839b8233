"""``allranks stacks`` shows where living ranks stand, and disturbs none of them."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from allranks.record.stacks import Frame, groups, parse
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
    assert (done.rc, done.stderr) == (0, "")
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
  File "/run/code/allranks/agent/workers/script.py", line 35 in run_as_main
  File "/run/code/allranks/agent/main.py", line 65 in main
"""
    found = parse(dump, 3, 1)
    file = "/home/me/it's train.py"
    assert found.frames == (Frame(file, 41, "load"), Frame(file, 88, "<module>"))
    assert (found.rank, found.node) == (3, 1)
    assert groups((found, parse(dump, 4, 1), parse("", 5, 1))) == [([5], parse("", 5, 1)), ([3, 4], found)]
