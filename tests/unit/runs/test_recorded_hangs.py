"""What is said of a hang, by where the ranks stand."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from allranks import contract
from allranks.agent.hangs import HangJudge
from allranks.diagnosis.hangs import verdict
from allranks.record.stacks import Collective
from allranks.runs.hangs import Group, Hang, named, newest, quiet_for, span
from node_orders import NODE

TORCH = "/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"
REDUCE = ((TORCH, 900, "all_reduce"), ("/me/train.py", 88, "step"))
LOAD = (("/usr/lib/python3.12/threading.py", 355, "wait"), ("/me/data.py", 41, "load"), ("/me/train.py", 80, "main"))
PDB = (("/usr/lib/python3.12/cmd.py", 126, "cmdloop"), ("/usr/lib/python3.12/pdb.py", 9, "f"), ("/me/train.py", 5, "g"))
EXIT = (("/usr/lib/python3.12/threading.py", 1590, "_shutdown"),)
WAIT = "ranks 0-62 wait in all_reduce at train.py:88"


def group(ranks: range, frames: Any, stack: str = "shown", state: str = "", pending: Collective | None = None) -> Group:
    return Group(tuple(ranks), frames, stack, state, pending)


def reduce(number: int = 4812, size: int = 33_000_000, name: str = "all_reduce", group: str = "0") -> Collective:
    return Collective(name, number, size, group)


def hang(*groups: Group, left: tuple[int, ...] = ()) -> Hang:
    return Hang(2000.0, 1700.0, groups, left, "report")


@pytest.mark.parametrize(
    ("other", "said", "kind"),
    [
        (group(range(63, 64), LOAD), "rank 63 is in load at data.py:41", "hang"),
        (group(range(63, 64), PDB), "rank 63 is in a debugger at train.py:5", "hang-in-debugger"),
        (
            group(range(63, 64), (), "late", "held"),
            "rank 63 waits for a disk or file server",
            "hang-in-kernel",
        ),
        (group(range(63, 64), (), "late", "stopped"), "rank 63 is stopped (SIGSTOP)", "hang-stopped"),
        (group(range(63, 64), (), "late", "traced"), "rank 63 is in a debugger", "hang-in-debugger"),
        (group(range(63, 64), (), "late"), "rank 63 did not react, in code that is not Python", "hang"),
        (group(range(63, 64), EXIT), "rank 63 is at the exit of the interpreter", "hang-at-exit"),
    ],
)
def test_the_odd_rank_is_named(other: Group, said: str, kind: str) -> None:
    found = hang(group(range(63), REDUCE), other)
    assert (found.sentence, found.kind) == (f"{WAIT}; {said}", kind)
    assert found.notice == f"no rank has advanced for 5 min: {WAIT}; {said}"
    assert (verdict(found).rank, verdict(found).id) == (63, kind)


def test_a_rank_that_left_and_ranks_in_other_collectives() -> None:
    left = hang(group(range(63), REDUCE), left=(63,))
    assert (left.sentence, left.kind) == (f"{WAIT}; rank 63 exited without an error", "hang-rank-left")
    assert verdict(left).rank == 63
    other = group(range(63, 64), ((TORCH, 5356, "barrier"), ("/me/train.py", 90, "main")))
    mismatch = hang(group(range(63), REDUCE), other)
    assert mismatch.kind == "hang-mismatch"
    assert mismatch.sentence == f"{WAIT}; rank 63 waits in barrier at train.py:90; they are in different collectives"


def test_a_collective_is_named_with_its_number_and_size() -> None:
    others = group(range(63), REDUCE, pending=reduce())
    found = hang(others, group(range(63, 64), LOAD))
    waits = "ranks 0-62 wait in all_reduce #4812 (33 MB) at train.py:88"
    assert found.sentence == f"{waits}; rank 63 is in load at data.py:41"
    assert named(reduce(1, 0, "barrier", "3")) == "barrier #1 (process group 3)"
    other = group(range(1), REDUCE, pending=reduce(7, 4, "broadcast", "2"))
    assert other.phrase == "rank 0 waits in all_reduce (pending: broadcast #7 (4 B, process group 2)) at train.py:88"


def test_a_rank_that_needs_the_result_of_a_collective_waits_in_it() -> None:
    """As over NCCL: the rank that is elsewhere is the one without a pending collective, though both stand in code."""
    found = hang(group(range(1), LOAD, pending=reduce()), group(range(1, 2), LOAD[1:]))
    assert found.sentence == (
        "rank 0 is in load at data.py:41, with all_reduce #4812 (33 MB) pending; rank 1 is in load at data.py:41"
    )
    assert (found.kind, verdict(found).rank) == ("hang", 1)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (reduce(), reduce(name="all_gather"), "they are in different collectives"),
        (reduce(), reduce(size=4), "the sizes of their tensors differ"),
        (reduce(name="gather"), reduce(name="gather", size=4), None),  # Only some ranks have an input, as in scatter.
        (reduce(), reduce(4813), None),  # One has completed the other's.
        (reduce(), reduce(name="broadcast", group="1"), None),
        (reduce(), None, None),
    ],
)
def test_collectives_that_differ(one: Collective, other: Collective | None, said: str | None) -> None:
    found = hang(group(range(3), LOAD, pending=one), group(range(3, 4), LOAD, pending=other))
    assert (found.mismatch, found.kind) == (said, "hang-mismatch" if said else "hang")
    assert verdict(found).sure == ("certain" if said else "likely")


def test_none_is_blamed_where_that_cannot_be_told() -> None:
    assert verdict(hang(group(range(2), LOAD))).rank is None
    assert verdict(hang(group(range(1), LOAD), group(range(1, 2), LOAD[1:]))).rank is None


@pytest.mark.parametrize(("seconds", "text"), [(45, "45 s"), (300, "5 min"), (9000, "2.5 h")])
def test_durations(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_last_words_of_ranks_in_a_hang_do_not_undo_it(tmp_path: Path) -> None:
    """A watchdog prints that it has waited for too long, and ends its rank."""
    fields = {"since": 100.0, "groups": [], "left": [], "action": "report"}
    events = [("hang", 400.0, fields), ("hang-over", 700.0, {}), ("ended", 705.0, {})]

    def found(count: int, end: float = 705.0) -> bool:
        node = tmp_path / "node-000"
        node.mkdir(exist_ok=True)
        times = [400.0, 700.0, end]
        lines = [
            json.dumps({"time": at, "host": "h", "kind": kind, **more})
            for (kind, _, more), at in zip(events[:count], times, strict=False)
        ]
        (node / contract.AGENT_EVENTS).write_text("\n".join(lines) + "\n")
        return newest(tmp_path) is not None

    assert [found(1), found(2), found(3), found(3, 3000.0)] == [True, False, True, False]


def test_a_run_without_progress_is_shown_as_such_after_a_minute_or_once_its_hang_is_reported(tmp_path: Path) -> None:
    node = tmp_path / "node-000"
    node.mkdir()

    def shown(quiet: float) -> bool:
        (node / contract.USAGE).write_text(json.dumps({"advanced": time.time() - quiet}))
        return quiet_for(tmp_path) is not None

    minute = contract.scaled_wait(60.0)
    assert [shown(1.0), shown(minute * 0.9), shown(minute)] == [False, False, True]
    fields = {"since": 100.0, "groups": [], "left": [], "action": "report"}
    event = {"time": 400.0, "host": "h", "kind": "hang", **fields}
    (node / contract.AGENT_EVENTS).write_text(json.dumps(event) + "\n")
    assert [shown(1.0), shown(minute * 0.9)] == [False, True]


QUIET = {"since": 100.0, "moving": False, "groups": [], "left": []}


def judge(**fields: Any) -> HangJudge:
    return HangJudge(NODE._replace(nnodes=2, **fields))


def test_a_run_hangs_when_all_nodes_are_quiet_and_a_rank_stays() -> None:
    moving = {**QUIET, "moving": True}
    judged = judge()
    assert judged.judge([QUIET, None]) is None  # The other node advances,
    assert judged.judge([moving, moving]) is None  # or all move in silence.
    event = judged.judge([QUIET, moving], left=[7])
    assert event is not None
    assert (event[0], event[1]["left"], event[1]["action"]) == ("hang", [7], "report")
    assert judged.judge([QUIET, moving]) is None  # It is reported once.
    assert judged.judge([QUIET, None]) == ("hang-over", {"since": 100.0})


@pytest.mark.parametrize(
    ("policy", "seconds", "terminal", "action"),
    [
        (None, 20.0, "", "end"),
        (None, 20.0, "1", "report"),
        (None, 2000.0, "", "report"),
        ("report", 20.0, "", "report"),
        ("restart", 2000.0, "", "restart"),
        ("end", 2000.0, "1", "end"),
    ],
)
def test_a_hang_near_the_time_limit_ends_a_run_that_nobody_watches(
    policy: str | None, seconds: float, terminal: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(contract.END_TIME, str(time.time() + seconds))
    monkeypatch.setenv(contract.TERMINAL, terminal)
    assert judge(on_hang=policy).action == action
