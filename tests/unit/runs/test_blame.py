"""Which rank is named where several have ended, from what their nodes' agents noted and what they wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.runs.blame import with_cause
from allranks.runs.status import State, Status

CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:33160"
ABORTED = "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1."
KILLED = "memory may have run out: it used 2 GB at most, the limit of its node is 8 GB"


def note(attempt: Path, node: int, ends: dict[int, tuple[int, str]], *, after: float = 0.0, restart: int = 0) -> None:
    """Write what a node's agent notes of ranks that end one after the other: code and stderr of each."""
    folder = attempt / f"node-{node:03}"
    folder.mkdir(parents=True, exist_ok=True)
    events = [{"kind": "ranks-started", "restart": restart}]
    for place, (rank, (code, said)) in enumerate(ends.items()):
        (folder / f"rank-{rank}.err").write_text(said)
        memory = {"memory": 2_000_000_000, "memory_limit": 8_000_000_000} if code == -9 else {}
        events += [{"kind": "rank-exited", "rank": rank, "code": code, "ended": after + place, **memory}]
    with (folder / "agent.jsonl").open("a") as stream:
        stream.writelines(json.dumps({"time": 0, "host": f"gpu0{node}", **event}) + "\n" for event in events)


def named(attempt: Path) -> tuple[int | None, str | None, str | None]:
    status = with_cause(Status(State.FAILED, reason="told", rank=1), attempt, 30.0)
    return status.rank, status.reason, status.cause


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({1: (1, "ValueError: x"), 0: (1, "KeyError: 1")}, (1, "told", "ValueError: x")),
        ({1: (1, CLOSED), 0: (-15, "")}, (1, "told", CLOSED)),
        ({1: (1, CLOSED), 0: (-15, "reading part 3 of 9\n")}, (1, "told", CLOSED)),
        ({1: (1, CLOSED), 0: (1, ABORTED)}, (1, "told", CLOSED)),
        ({1: (1, CLOSED), 0: (1, "KeyError: 1")}, (0, "rank 0 exited with code 1", "KeyError: 1")),
        ({1: (-6, ABORTED), 0: (-15, "KeyError: 1")}, (0, "rank 0 failed", "KeyError: 1")),
        ({1: (1, CLOSED), 0: (0, "KeyError: 1")}, (1, "told", CLOSED)),
        ({1: (1, CLOSED), 0: (-15, "KeyboardInterrupt")}, (1, "told", CLOSED)),
        ({1: (1, CLOSED), 0: (-11, "")}, (0, "rank 0 was killed by SIGSEGV", None)),
        ({1: (1, CLOSED), 0: (-9, "")}, (0, "rank 0 was killed by SIGKILL", KILLED)),
        (
            {1: (1, CLOSED), 2: (-15, ""), 3: (1, "A: b"), 0: (1, "KeyError: 1")},
            (3, "rank 3 exited with code 1", "A: b"),
        ),
        ({1: (-9, "WARNING: slow\n")}, (1, "told", f"{KILLED}; its last words: WARNING: slow")),
    ],
)
def test_who_is_named(tmp_path: Path, ends: dict[int, tuple[int, str]], expected: tuple[int, str, str | None]) -> None:
    note(tmp_path, 0, ends)
    assert named(tmp_path) == expected


def test_a_rank_that_was_killed_for_its_deafness_is_not_named(tmp_path: Path) -> None:
    note(tmp_path, 0, {1: (1, CLOSED)})
    note(tmp_path, 0, {0: (-9, "")}, after=30.0)
    assert named(tmp_path) == (1, "told", CLOSED)


@pytest.mark.parametrize("code", [0, 75])
def test_a_rank_that_finished_while_others_needed_it_is_the_cause(tmp_path: Path, code: int) -> None:
    note(tmp_path, 0, {3: (code, ""), 0: (0, ""), 1: (1, f"{CLOSED} (train.py:7)")})
    first = {0: "rank 3", 75: "rank 0"}[code]
    assert named(tmp_path) == (1, "told", f"{first} exited with code 0 while rank 1 was in a collective (train.py:7)")


TIMED_OUT = "RuntimeError: Timed out waiting 5000ms for recv operation to complete (train.py:7)"
LATE = "rank 0 was still running when a collective of rank 1 timed out (train.py:7)"


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({0: (-15, "")}, LATE),
        ({0: (-9, "")}, LATE),
        ({0: (-15, "reading part 3 of 9\n")}, LATE),
        ({0: (-15, ""), 2: (1, CLOSED)}, LATE),
        ({0: (-15, ""), 2: (1, TIMED_OUT)}, LATE),
        ({0: (-15, ""), 2: (-15, "")}, TIMED_OUT),
        ({0: (1, TIMED_OUT)}, TIMED_OUT),
        ({0: (1, CLOSED)}, TIMED_OUT),
    ],
)
def test_a_rank_that_was_late_for_a_collective_is_the_cause(
    tmp_path: Path, others: dict[int, tuple[int, str]], expected: str
) -> None:
    """Of several that wrote nothing, any may be the late one."""
    note(tmp_path, 0, {1: (1, TIMED_OUT)})
    note(tmp_path, 0, others, after=30.0)
    assert named(tmp_path) == (1, "told", expected)


def test_a_rank_that_was_stopped_after_a_lost_connection_was_not_late(tmp_path: Path) -> None:
    note(tmp_path, 0, {1: (1, CLOSED), 0: (-15, "")})
    assert named(tmp_path) == (1, "told", CLOSED)


@pytest.mark.parametrize("said", ["ConnectionResetError: Connection reset by peer", "KeyError: 1"])
def test_a_rank_that_finished_is_not_the_cause_of_other_errors(tmp_path: Path, said: str) -> None:
    note(tmp_path, 0, {0: (0, ""), 1: (1, said)})
    assert named(tmp_path) == (1, "told", said)


@pytest.mark.parametrize(
    ("fact", "cause"),
    [
        ("oom_kill grew by 1", "memory ran out: it used 2 GB at most, the limit of its node is 8 GB"),
        (
            "SIGKILL, and oom_kill did not grow",
            "the kernel did not kill it for its memory: a person, a scheduler or another program did",
        ),
    ],
)
def test_the_kernels_count_says_whether_memory_ran_out(tmp_path: Path, fact: str, cause: str) -> None:
    note(tmp_path, 0, {1: (-9, "")})
    with (tmp_path / "node-000" / "agent.jsonl").open("a") as stream:
        line = f"control group: {fact} since the ranks started"
        stream.write(json.dumps({"time": 0, "host": "a", "kind": "node-facts", "rank": 1, "lines": [line]}) + "\n")
    assert named(tmp_path) == (1, "told", cause)


def test_a_rank_of_another_node(tmp_path: Path) -> None:
    note(tmp_path, 0, {1: (1, CLOSED)})
    note(tmp_path, 1, {2: (1, "KeyError: 1")}, after=1.0)
    assert named(tmp_path) == (2, "rank 2 on gpu01 exited with code 1", "KeyError: 1")


def test_what_ranks_said_before_the_last_restart_does_not_count(tmp_path: Path) -> None:
    note(tmp_path, 1, {2: (1, "KeyError: 1")})
    note(tmp_path, 0, {1: (1, CLOSED)}, restart=1)
    assert named(tmp_path) == (1, "told", CLOSED)


def test_without_an_agent_the_log_tells(tmp_path: Path) -> None:
    (tmp_path / "node-000").mkdir()
    assert named(tmp_path) == (1, "told", None)
    (tmp_path / "node-000" / "rank-1.err").write_text("KeyError: 1\n")
    assert named(tmp_path) == (1, "told", "KeyError: 1")
