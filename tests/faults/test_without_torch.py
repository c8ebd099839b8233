"""Ranks that need no torch: the agent drives them without it, and imports it when one connects to the store."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from fault_tools import GATE, count_imports

from waiting import wait_for

#: Rank 0 dials where the store is, as torch.distributed would.
DIALS = """\
import os, socket, sys, time
if os.environ["RANK"] == "0":
    line = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(.01)
print("on", flush=True)
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.parametrize("options", [("train.py",), ("train.py", "--no-warm"), ("--binary", "./job.sh")])
def test_ranks_that_need_no_torch_do_not_wait_for_it(allranks, watch, options):
    imports, env = count_imports(allranks)
    allranks.script("import os\nprint(os.environ['WORLD_SIZE'])\n")
    allranks.script("#!/bin/sh\necho $WORLD_SIZE\n", "job.sh").chmod(0o755)
    done = allranks("run", *options, "--nproc-per-node", "2", **env)
    assert (done.rc, done.by_rank) == (0, {0: ["2"], 1: ["2"]})
    assert not imports.exists()
    kinds = [event["kind"] for event in watch.events()]
    assert kinds == ["agent-started", "ranks-started", "rank-exited", "rank-exited", "ended"]
    assert watch.event("agent-started")["torch"] is None


def test_without_torch_ranks_are_forked_all_the_same(allranks, watch):
    allranks.script("import os\nprint(os.getppid(), os.environ.get('PYTHONUNBUFFERED'))\n")
    assert allranks("run", "train.py", "--nproc-per-node", "2").rc == 0
    said = {(watch.node / f"rank-{rank}.out").read_text() for rank in (0, 1)}
    assert len(said) == 1
    assert said.pop().endswith(" None\n")
    assert watch.event("agent-started")["plain"] is None


@pytest.fixture
def without_torch(allranks):
    """Give an environment in which torch cannot be imported."""
    torch = allranks.folder / "site" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise ImportError('there is none')\n")
    return {"PYTHONPATH": str(torch.parent)}


@pytest.mark.parametrize("code", [0, 3])
def test_where_there_is_no_torch_ranks_that_need_none_run(allranks, watch, without_torch, code):
    allranks.script(f"import sys\nprint('here')\nsys.exit({code})\n")
    done = allranks("run", "train.py", **without_torch)
    assert (done.rc, done.stdout) == (code, "[0] here\n")
    assert watch.status()["state"] == ("FAILED" if code else "SUCCEEDED")


def test_where_there_is_no_torch_ranks_are_restarted_as_often_as_allowed(allranks, watch, without_torch):
    allranks.script("import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(3)\ntime.sleep(300)\n")
    done = allranks("run", "train.py", "--nproc-per-node", "2", "--max-restarts", "1", **without_torch)
    assert done.rc == 3
    assert [(event["rank"], event["code"]) for event in watch.events("rank-exited")] == [(1, 3), (0, -15)] * 2
    (restart,) = watch.events("restart")
    assert (restart["restart"], restart["delay"], restart["because_of_rank"]) == (1, 0.0, 1)
    watch.nothing_left()
    status = watch.status()
    assert (status["state"], status["restarts"], status["rank"]) == ("FAILED", 1, 1)


def test_where_there_is_no_torch_a_rank_that_connects_ends_the_run_and_nothing_is_left(allranks, watch, without_torch):
    allranks.script(DIALS)
    done = allranks("run", "train.py", "--nproc-per-node", "2", "--", "0", **without_torch)
    assert done.rc == 1
    assert f"\nerror: {sys.executable} cannot import torch\n  why: there is none\n" in done.stderr
    assert [event["code"] for event in watch.events("rank-exited")] == [-15, -15]
    watch.nothing_left()
    assert watch.status()["state"] == "FAILED"


def test_children_that_train_find_the_store(allranks, watch):
    """It takes more than 10 s on a slow machine: the agent and the child of each rank import torch."""
    imports, env = count_imports(allranks)
    allranks.script("import subprocess, sys\nsys.exit(subprocess.call([sys.executable, 'child.py']))\n")
    allranks.script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print('sum', int(total), flush=True)\n"
        "dist.destroy_process_group()\n",
        "child.py",
    )
    done = allranks("run", "train.py", "--nproc-per-node", "2", **env)
    assert (done.rc, done.by_rank) == (0, {0: ["sum 2"], 1: ["sum 2"]}), done.stderr
    assert len(set(imports.read_text().split()) - {str(watch.agent())}) == 2
    assert str(watch.agent()) in imports.read_text().split()
    kinds = [event["kind"] for event in watch.events()]
    assert kinds == ["agent-started", "ranks-started", "rank-exited", "rank-exited", "ended"]


def test_ranks_that_were_started_without_torch_are_restarted_without_it_with_the_same_variables(allranks, watch):
    imports, env = count_imports(allranks)
    allranks.script(
        "import json, os, sys, time\n"
        "name = 'env-' + os.environ['TORCHELASTIC_RESTART_COUNT'] + '-' + os.environ['RANK']\n"
        "with open(name + '.tmp', 'w') as file:\n"
        "    json.dump(dict(os.environ), file)\n"
        "os.rename(name + '.tmp', name)\n"
        "if name == 'env-0-1':\n"
        "    while not os.path.exists('env-0-0'):\n"
        "        time.sleep(.01)\n"
        "    sys.exit(5)\n"
        "if name == 'env-0-0':\n"
        "    time.sleep(300)\n"
    )
    assert allranks("run", "train.py", "--nproc-per-node", "2", "--max-restarts", "3", **env).rc == 0
    assert not imports.exists()
    assert [(event["rank"], event["code"]) for event in watch.events("rank-exited")[:2]] == [(1, 5), (0, -15)]
    (restart,) = watch.events("restart")
    assert (restart["restart"], restart["because_of_rank"]) == (1, 1)
    starts = watch.events("ranks-started")
    assert [event["restart"] for event in starts] == [0, 1]
    for rank in (0, 1):
        first, second = (json.loads((allranks.folder / f"env-{n}-{rank}").read_text()) for n in (0, 1))
        differ = {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}
        assert differ <= {"MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"}
        assert [env["MASTER_PORT"] for env in (first, second)] == [str(event["master_port"]) for event in starts]


def _until_torch_is_imported(allranks, watch, code):
    imports, env = count_imports(allranks, GATE)
    os.mkfifo(allranks.folder / "gate")
    allranks.script(DIALS)
    process = allranks.popen("run", "train.py", "--nproc-per-node", "2", "--", str(code), **env)
    wait_for("the import of torch", lambda: imports.exists() and imports.read_text() == f"{watch.agent()}\n")
    return process


def _hear_both(process, text):
    """Read a line of each of the two ranks, which are one line if they were written at about the same time."""
    first = process.stdout.readline()
    if first != b"[0-1] %s\n" % text:
        assert {first, process.stdout.readline()} == {b"[0] %s\n" % text, b"[1] %s\n" % text}


@pytest.mark.parametrize("code", [0, 7])
def test_the_run_goes_on_and_ends_while_torch_is_imported(allranks, watch, finish, code):
    process = _until_torch_is_imported(allranks, watch, code)
    _hear_both(process, b"up")
    (allranks.folder / "go").touch()
    _hear_both(process, b"on")
    assert finish(process)[0] == code
    assert watch.status()["state"] == ("FAILED" if code else "SUCCEEDED")
    watch.nothing_left()


def test_a_signal_is_heard_while_torch_is_imported(allranks, watch, finish):
    process = _until_torch_is_imported(allranks, watch, 0)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert [event["code"] for event in watch.events("rank-exited")] == [-2, -2]
    assert watch.status()["state"] == "CANCELLED"
    watch.nothing_left()


def test_a_signal_is_heard_once_the_store_answers(allranks, watch, finish):
    """It takes more than 10 s on a slow machine: an agent imports torch."""
    process = _until_torch_is_imported(allranks, watch, 0)
    (allranks.folder / "gate").write_text("")
    store = f":{watch.event('ranks-started')['master_port']:04X} 00000000:0000 0A"
    wait_for("the store to answer", lambda: not _waits_for_an_answer(store))
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143
    assert len(watch.events("ranks-started")) == 1
    assert [event["code"] for event in watch.events("rank-exited")] == [-15, -15]
    assert watch.status()["state"] == "CANCELLED"
    watch.nothing_left()


def _waits_for_an_answer(socket_line):
    """Return whether somebody has dialled at a socket that listens and was not taken (man 5 proc: rx_queue)."""
    with open("/proc/net/tcp") as table:
        found = [line for line in table if socket_line in line]
    return bool(found) and not found[0].split()[4].endswith(":00000000")
