"""What the local kind says of a run, from what is on disk and who is alive."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import pytest

from allranks.clusters.local import LocalCluster
from allranks.clusters.local_agent import ChildAgent, identify
from allranks.runs.record import Record, Run
from allranks.runs.status import Handle, State, Status
from waiting import PATIENCE, wait_for

BEGAN = [{"kind": "agent-started", "pid": 1, "began": 5.0}]
RUNNING = [*BEGAN, {"kind": "ranks-started", "restart": 2, "ranks": []}]
ENDED = [*RUNNING, {"kind": "ended", "state": "FAILED", "exit_code": 7, "reason": "why", "because_of_rank": 1}]


@pytest.fixture
def gone():
    """Give the handle of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    handle = identify(child.pid)
    child.communicate()
    return handle


@pytest.fixture
def make(tmp_path):
    def run(handle, events, *, age=0.0, beat=None):
        node = tmp_path / "run" / "attempts" / "000" / "node-000"
        node.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"time": 9.0, "host": "h", **event}) + "\n" for event in events]
        (node / "agent.jsonl").write_text("".join(lines))
        if beat is not None:
            (node / "heartbeat").write_text(f"{time.time() - beat:017.6f}\n")
        record = Record(
            id="run",
            name="n",
            cluster="local",
            kind="local",
            world_size=2,
            nnodes=1,
            host=socket.gethostname(),
            stop_timeout=1.0,
            file_mode=0o600,
            created=0.0,
        )
        record = record.from_json({**record.to_json(), "created": time.time() - age})
        return Run(tmp_path / "run", record).with_handle(handle, Status(State.PENDING, "starting"))

    return run


def _facts(status):
    return status.state.value, status.native, status.exit_code


def test_a_told_end_is_the_end(make, gone):
    status = LocalCluster().status(make(gone, ENDED))
    assert _facts(status) == ("FAILED", "ended", 7)
    assert (status.rank, status.reason, status.started, status.ended, status.restarts) == (1, "why", 5.0, 9.0, 2)


def test_a_dead_agent_that_told_no_end_has_failed(make, gone):
    assert _facts(LocalCluster().status(make(gone, RUNNING))) == ("FAILED", "agent gone", 1)
    early = LocalCluster().status(make(gone, []))
    assert (*_facts(early), early.reason) == (
        "FAILED",
        "agent gone",
        1,
        "the node's script ended before the agent started",
    )


def test_a_living_agent_runs(make):
    import os

    me = identify(os.getpid())
    assert _facts(LocalCluster().status(make(me, RUNNING))) == ("RUNNING", "ranks running", None)
    assert _facts(LocalCluster().status(make(me, BEGAN))) == ("PENDING", "starting ranks", None)
    restart = [*RUNNING, {"kind": "restart", "restart": 3, "delay": 1.0}]
    status = LocalCluster().status(make(me, restart))
    assert (*_facts(status), status.restarts) == ("RUNNING", "restarting", None, 3)


@pytest.mark.parametrize(("beat", "state"), [(1, "RUNNING"), (29, "RUNNING"), (31, "UNKNOWN"), (None, "UNKNOWN")])
def test_elsewhere_the_heartbeat_decides(make, beat, state):
    status = LocalCluster().status(make(Handle(host="elsewhere", pid=1, started=1.0), RUNNING, beat=beat))
    assert status.state.value == state
    if state == "UNKNOWN":
        assert status.reason.startswith("it was started on elsewhere, and its agent")


def test_a_run_whose_launcher_ended_before_it_had_an_agent(make):
    assert _facts(LocalCluster().status(make(Handle(), [], age=1))) == ("PENDING", "starting", None)
    late = LocalCluster().status(make(Handle(), [], age=100))
    assert _facts(late) == ("FAILED", "never started", 1)
    LocalCluster().cancel(make(Handle(), []))


CHILD = {
    "silent": ("import sys; sys.exit(0)", 0, ("SUCCEEDED", "ended", 0)),
    "failed": ("import sys; sys.exit(7)", 0, ("FAILED", "ended", 7)),
    "killed by another": ("import os; os.kill(os.getpid(), 9)", 0, None),
    "killed by us": ("import time; print(1, flush=True); time.sleep(60)", 15, ("CANCELLED", "ended", 143)),
}


@pytest.mark.parametrize("name", CHILD)
def test_the_end_of_a_child_that_could_not_tell(tmp_path, name):
    code, number, expected = CHILD[name]
    log = tmp_path / "log"
    child = ChildAgent([sys.executable, "-c", code], {}, log, 0o600, attached=True)
    if number:
        wait_for("the child", log.read_text)
        child.signal(number)
    assert child.wait(PATIENCE) or child.wait(PATIENCE)
    told = Status(State.RUNNING, "ranks running", started=5.0)
    understood = child.understand(told)
    assert (understood and _facts(understood)) == expected
    if not number:
        assert child.understand(Status(State.PENDING, "starting")) is None
