"""An end is seen whatever can be written down of it, and however a child's end can be waited for."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import cast

import pytest

from allranks.clusters.base import ClusterKind
from allranks.clusters.local_agent import ChildAgent
from allranks.launch.refresh import observed, settled
from allranks.runs.record import Record, Run, load
from allranks.runs.status import State, Status
from waiting import PATIENCE

EVENTS = [
    {"kind": "agent-started", "pid": 1, "began": 5.0},
    {"kind": "ranks-started", "restart": 0, "world_size": 2, "nodes": 1, "ranks": []},
    {"kind": "ended", "state": "FAILED", "exit_code": 7, "reason": "why", "because_of_rank": 1},
]
END = Status(State.FAILED, "ended", reason="why", exit_code=7, rank=1, started=5.0, ended=9.0)


@pytest.fixture
def unsettled(tmp_path: Path) -> Run:
    """Give a run that has ended, and nobody has written that down."""
    run = tmp_path / "run"
    node = run / "attempts" / "000" / "node-000"
    node.mkdir(parents=True)
    lines = [json.dumps({"time": 9.0, "host": "h", **event}) + "\n" for event in EVENTS]
    (node / "agent.jsonl").write_text("".join(lines))
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
    (run / "record.json").write_text(json.dumps(record.to_json()))
    return load(run)


def test_an_end_is_written_down(unsettled: Run) -> None:
    assert unsettled.record.status.state is State.PENDING
    assert observed(unsettled).record.status == END
    assert load(unsettled.folder) == unsettled
    now = settled(unsettled)
    assert now.record.status == END
    assert load(unsettled.folder) == now


def test_an_end_that_cannot_be_written_down_is_seen_all_the_same(unsettled: Run) -> None:
    record = unsettled.folder / "record.json"
    record.unlink()
    record.mkdir()
    now = settled(unsettled)
    assert (now.record.status, now.folder) == (END, unsettled.folder)
    assert {path.name for path in unsettled.folder.iterdir()} == {"attempts", "record.json"}


class Told:
    """A kind of cluster that another command asks too: that one sees the end first, and knows what ended the run."""

    name = "told"

    def status(self, run: Run) -> Status:
        """Tell of an end that the other has just written down."""
        run.with_status(END._replace(state=State.CANCELLED, exit_code=130))
        return END._replace(state=State.CANCELLED, exit_code=143)


def test_an_end_that_another_command_has_written_down_meanwhile_stays(unsettled: Run) -> None:
    now = settled(unsettled, cast("ClusterKind", Told()))
    assert now.record.status.exit_code == 130
    assert load(unsettled.folder).record.status.exit_code == 130


def _refuse(_: int, __: int = 0) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.fixture(params=["there", "refused", "missing"])
def pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pidfd_open as it is, refused by the kernel, or missing from the interpreter."""
    if request.param == "refused":
        monkeypatch.setattr(os, "pidfd_open", _refuse, raising=False)
    elif request.param == "missing":
        monkeypatch.delattr(os, "pidfd_open", raising=False)


RUNNING = Status(State.RUNNING, "ranks running", started=5.0)


@pytest.mark.usefixtures("pidfd")
def test_a_childs_end_is_waited_for_and_told(tmp_path: Path) -> None:
    child = ChildAgent(["sh", "-c", "read line; exit 7"], {}, tmp_path / "log", 0o600, attached=True)
    assert not child.wait(0)  # It ends only below: who waits longer waits for ever.
    began = time.monotonic()
    assert not child.wait(0.2)
    assert time.monotonic() - began >= 0.2
    assert child._process.stdin is not None
    child._process.stdin.write(b"\n")
    child._process.stdin.flush()
    assert child.wait(PATIENCE)
    assert child.wait(0)
    status = child.understand(RUNNING)
    assert status is not None
    assert (status.state, status.exit_code) == (State.FAILED, 7)


@pytest.mark.usefixtures("pidfd")
def test_a_child_that_was_told_to_end_was_cancelled(tmp_path: Path) -> None:
    child = ChildAgent(["sleep", "300"], {}, tmp_path / "log", 0o600, attached=False)
    child.signal(signal.SIGTERM)
    assert child.wait(PATIENCE)
    status = child.understand(RUNNING)
    assert status is not None
    assert (status.state, status.reason, status.exit_code) == (State.CANCELLED, "got SIGTERM", 143)


class Failed:
    """A kind of cluster whose scheduler tells that an array has failed, and no more."""

    name = "failed"

    def status(self, run: Run) -> Status:
        """Tell so."""
        return Status(State.FAILED, "F (finished)", exit_code=7)


def test_of_an_array_all_ranks_are_told_and_the_task_that_failed(unsettled: Run) -> None:
    for task, state, reason in ((0, "SUCCEEDED", None), (2, "FAILED", "rank 1 exited with code 7"), (10, None, "")):
        attempt = unsettled.folder / f"task-{task}/attempts/000"
        (attempt / "node-000").mkdir(parents=True)
        ended = {"kind": "ended", "state": state, "exit_code": 7 if reason else 0, "reason": reason}
        events = [*EVENTS[:2], *([ended] if state else [])]
        lines = [json.dumps({"time": 9.0, "host": "h", **event}) + "\n" for event in events]
        (attempt / "node-000" / "agent.jsonl").write_text("".join(lines))
    record = observed(unsettled, cast("ClusterKind", Failed())).record
    assert (record.world_size, record.nnodes) == (6, 3)
    assert record.status.reason == "task 2: rank 1 exited with code 7"
    for task in (0, 2):
        (unsettled.folder / f"task-{task}/attempts/000/node-000/agent.jsonl").unlink()
    (unsettled.folder / "task-0/attempts/000/exit").write_text("0\n")
    (unsettled.folder / "task-2/attempts/000/exit").write_text("7\n")  # Of launcher direct.
    assert observed(unsettled, cast("ClusterKind", Failed())).record.status.reason == "task 2 exited with code 7"


def test_it_tells_of_the_ranks_and_nodes_that_were_started_last(unsettled: Run) -> None:
    """An elastic run may get fewer nodes than it requested, and lose some later."""
    other = unsettled.folder / "attempts/000/node-001"
    other.mkdir()
    for folder, events in ((unsettled.node_folder(0), ((8, 12, 3), (9, 8, 2))), (other, ((8, 12, 3),))):
        lines = [
            {"time": when, "host": "h", "kind": "ranks-started", "world_size": ranks, "nodes": nodes}
            for when, ranks, nodes in events
        ]
        (folder / "agent.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    now = observed(unsettled)
    assert (now.record.world_size, now.record.nnodes) == (8, 2)
