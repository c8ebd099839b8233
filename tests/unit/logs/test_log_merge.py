from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_attempt import FakeAttempt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allranks import contract
from allranks.logs.lineform import LineForm
from allranks.logs.merge import HOLD
from allranks.logs.streams import LONGEST


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[FakeAttempt]:
    made = FakeAttempt(tmp_path / "000")
    yield made
    made.close()


def test_time_order_not_rank_order(attempt: FakeAttempt) -> None:
    for rank, text in ((1, b"a\n"), (0, b"b\n"), (1, b"c\nd\n"), (0, b"e\n")):
        attempt.write(rank, text)
        attempt.tick(50)
    attempt.merged().finish()
    assert attempt.shown() == b"[1] a\n[0] b\n[1] c\n[1] d\n[0] e\n"


def test_what_all_ranks_of_a_node_wrote_into_one_file_is_the_nodes(attempt: FakeAttempt) -> None:
    attempt.write(contract.ALL_OF_A_NODE, b"a\n")
    attempt.tick(50)
    attempt.write(contract.ALL_OF_A_NODE, b"b\n", "err")
    attempt.tick(50)
    attempt.write(contract.ALL_OF_A_NODE, b"nobody noted this\n")
    attempt.merged().finish()
    assert attempt.shown() == b"[node 0] a\n[node 0] b\n[node 0] nobody noted this\n"
    attempt.merged(ranks=[0]).finish()
    assert attempt.shown() == b""


def test_lines_of_nodes_fold(attempt: FakeAttempt) -> None:
    for node in (0, 1):
        attempt.write(contract.ALL_OF_A_NODE, b"the same\n", node=node)
        attempt.tick()
    attempt.merged().finish()
    assert attempt.shown() == b"[node 0-1] the same\n"


@pytest.mark.parametrize("fold", [True, False])
def test_stdout_and_stderr_go_apart_in_one_order(attempt: FakeAttempt, fold: bool) -> None:
    attempt.write(0, b"out 1\n")
    attempt.write(1, b"err 1\n", "err")
    attempt.tick(50)
    attempt.write(0, b"err 2\n", "err")
    attempt.tick(50)
    attempt.write(0, b"out 2\n")
    attempt.tick(50)
    attempt.merged(fold=fold).finish()
    assert attempt.shown() == b"[0] out 1\n[1] err 1\n[0] err 2\n[0] out 2\n"
    assert attempt.out.data == b"[0] out 1\n[0] out 2\n"
    assert attempt.err.data == b"[1] err 1\n[0] err 2\n"


def test_the_same_line_folds_also_a_tick_apart(attempt: FakeAttempt) -> None:
    attempt.write(0, b"A\nX\n")
    attempt.tick(50)
    attempt.write(1, b"X\n")
    attempt.tick(50)
    attempt.merged().finish()
    assert attempt.shown() == b"[0] A\n[0-1] X\n"


def test_the_same_line_much_later_does_not_fold(attempt: FakeAttempt) -> None:
    attempt.write(0, b"X\n")
    attempt.tick(50)
    attempt.write(1, b"X\n")
    attempt.tick(HOLD + 1)
    attempt.merged().finish()
    assert attempt.shown() == b"[0] X\n[1] X\n"


def test_the_same_line_on_stdout_and_stderr_does_not_fold(attempt: FakeAttempt) -> None:
    attempt.write(0, b"X\n")
    attempt.write(1, b"X\n", "err")
    attempt.tick(50)
    attempt.merged().finish()
    assert attempt.shown() == b"[0] X\n[1] X\n"


def test_ticks_that_cut_through_a_step_do_not_keep_lines_from_folding(attempt: FakeAttempt) -> None:
    for step in range(20):
        attempt.write(0, b"step %d\n" % step)
        attempt.tick(50)
        attempt.write(1, b"step %d\n" % step)
    attempt.tick(50)
    attempt.merged().finish()
    assert attempt.shown() == b"".join(b"[0-1] step %d\n" % step for step in range(20))


def test_no_folding_if_not_wanted(attempt: FakeAttempt) -> None:
    attempt.write(0, b"X\nY\n")
    attempt.write(1, b"X\n")
    attempt.tick(50)
    merged = attempt.merged(fold=False)
    merged.pump()
    assert attempt.shown() == b"[0] X\n[0] Y\n[1] X\n"


def test_a_lone_line_waits_only_for_a_moment(attempt: FakeAttempt) -> None:
    merged = attempt.merged()
    attempt.write(0, b"X\n")
    attempt.tick(50)
    merged.pump()
    attempt.ms += HOLD - 1
    merged.pump()
    assert attempt.shown() == b""
    attempt.ms += 1
    merged.pump()
    assert attempt.shown() == b"[0] X\n"
    merged.finish()
    assert attempt.shown() == b""


def test_what_all_ranks_wrote_does_not_wait(attempt: FakeAttempt) -> None:
    merged = attempt.merged(world_size=2)
    attempt.write(0, b"X\nA\n")
    attempt.write(1, b"X\n")
    attempt.tick()
    merged.pump()
    assert attempt.shown() == b"[0-1] X\n"
    merged.finish()
    assert attempt.shown() == b"[0] A\n"


@pytest.mark.parametrize("options", [{"ranks": {1}}, {"world_size": 1}])
def test_a_single_rank_waits_for_nobody(attempt: FakeAttempt, options: dict[str, object]) -> None:
    merged = attempt.merged(**options)
    attempt.write(1, b"X\n")
    attempt.tick()
    merged.pump()
    assert attempt.shown() == b"[1] X\n"


def test_an_unfinished_line_is_held_back(attempt: FakeAttempt) -> None:
    merged = attempt.merged(fold=False)
    attempt.write(0, b"half")
    attempt.tick(50)
    merged.pump()
    assert attempt.shown() == b""
    attempt.write(0, b" whole\nend")
    attempt.write(1, b"x\n")
    attempt.tick(50)
    merged.pump()
    assert attempt.shown() == b"[0] half whole\n[1] x\n"
    merged.finish()
    assert attempt.shown() == b"[0] end\n"


def test_unfinished_last_lines_fold(attempt: FakeAttempt) -> None:
    attempt.write(0, b"X")
    attempt.write(1, b"X")
    attempt.tick(50)
    attempt.merged().finish()
    assert attempt.shown() == b"[0-1] X\n"


def test_10_mb_without_a_newline(attempt: FakeAttempt) -> None:
    merged = attempt.merged()
    attempt.write(0, b"x" * 10_000_000)
    attempt.write(1, b"y\n")
    attempt.tick(50)
    merged.pump()
    merged.finish()
    lines = attempt.out.data.splitlines()
    assert sorted({len(line) for line in lines if line.startswith(b"[0]")}) == [
        4 + 10_000_000 % LONGEST,
        4 + LONGEST,
    ]
    assert sum(len(line) - 4 for line in lines if line.startswith(b"[0] ")) == 10_000_000
    assert b"[1] y" in lines


def test_bytes_that_are_not_utf8(attempt: FakeAttempt) -> None:
    attempt.write(0, b"\xff\xfe \x80\x00\n")
    attempt.tick(50)
    attempt.merged().finish()
    assert attempt.shown() == b"[0] \xff\xfe \x80\x00\n"


def test_progress_bar(attempt: FakeAttempt) -> None:
    merged = attempt.merged(fold=False)
    assert merged.transient() is None
    attempt.write(0, b"\r10%", "err")
    attempt.tick(50)
    merged.pump()
    assert (attempt.shown(), merged.transient()) == (b"", b"[0] 10%")
    attempt.write(1, b"\r15%", "err")
    attempt.tick(50)
    attempt.write(0, b"text\n")
    attempt.tick(50)
    merged.pump()
    assert (attempt.shown(), merged.transient()) == (b"[0] text\n", b"[1] 15%")
    attempt.write(1, b"\r100%\n", "err")
    attempt.tick(50)
    merged.pump()
    assert (attempt.shown(), merged.transient()) == (b"[1] 100%\n", None)
    merged.finish()
    assert attempt.shown() == b"[0] 10%\n"


def test_missing_index(attempt: FakeAttempt) -> None:
    attempt.path(1).write_bytes(b"b\nX\n")
    attempt.path(0).write_bytes(b"a\nX\nhalf")
    attempt.path(0, "err").write_bytes(b"c\n")
    merged = attempt.merged()
    merged.pump()
    assert attempt.shown() == b""
    merged.finish()
    assert attempt.shown() == b"[0] a\n[1] b\n[0-1] X\n[0] half\n[0] c\n"


def test_bytes_that_no_index_told_of_come_last(attempt: FakeAttempt) -> None:
    attempt.write(0, b"a\n")
    attempt.tick(50)
    attempt.write(0, b"z\n")
    attempt.path(1).write_bytes(b"y\n")
    index = attempt.node() / contract.LOG_INDEX
    with index.open("ab") as stream:
        stream.write(b"170000000")
    attempt.merged().finish()
    assert attempt.shown() == b"[0] a\n[0] z\n[1] y\n"


def test_a_damaged_index_loses_nothing(attempt: FakeAttempt) -> None:
    attempt.write(0, b"a\nb\n")
    (attempt.node() / contract.LOG_INDEX).write_bytes(
        b"junk\n1700000000000 0 o 2\n1700000000050 0 o 999\n1700000000100 7 o 5\n"
    )
    merged = attempt.merged()
    merged.pump()
    merged.finish()
    assert attempt.shown() == b"[0] a\n[0] b\n"


def test_files_and_nodes_that_appear_late(attempt: FakeAttempt) -> None:
    merged = attempt.merged(nnodes=2, fold=False)
    merged.pump()
    attempt.write(0, b"a\n")
    attempt.tick(50)
    merged.pump()
    attempt.write(8, b"b\n", node=1)
    attempt.write(1, b"c\n", "err")
    attempt.tick(50)
    merged.pump()
    assert attempt.shown() == b"[0:0] a\n[0:1] c\n[1:8] b\n"


def test_a_log_that_is_seen_later_than_its_index(attempt: FakeAttempt) -> None:
    attempt.node()
    (attempt.node() / contract.LOG_INDEX).write_bytes(b"1700000000000 0 o 2\n")
    merged = attempt.merged(fold=False)
    merged.pump()
    assert attempt.shown() == b""
    attempt.path(0).write_bytes(b"a\n")
    merged.pump()
    assert attempt.shown() == b"[0] a\n"


def test_a_log_that_shrank_starts_over(attempt: FakeAttempt) -> None:
    merged = attempt.merged(fold=False)
    attempt.write(0, b"one\ntwo\nhalf")
    attempt.tick(50)
    merged.pump()
    assert attempt.shown() == b"[0] one\n[0] two\n"
    os.truncate(attempt.path(0), 0)
    attempt.write(0, b"new\n")
    attempt.tick(50)
    merged.pump()
    assert attempt.shown() == b"[0] half\n[0] new\n"
    os.truncate(attempt.path(0), 0)
    merged.finish()
    assert attempt.shown() == b""
    attempt.merged().finish()
    assert attempt.shown() == b""


def test_a_log_that_shrank_before_it_was_read(attempt: FakeAttempt) -> None:
    attempt.write(0, b"one\ntwo\n")
    attempt.tick(50)
    os.truncate(attempt.path(0), 0)
    attempt.write(0, b"new\n")
    attempt.tick(50)
    attempt.write(0, b"and\nmore\n")
    attempt.tick(50)
    attempt.merged().finish()
    assert attempt.shown() == b"[0] new\n[0] and\n[0] more\n"


def test_two_nodes(attempt: FakeAttempt) -> None:
    for rank in range(16):
        attempt.write(rank, b"hello\n", node=rank // 8)
    attempt.write(3, b"three\n")
    attempt.write(12, b"twelve\n", node=1)
    attempt.tick(50)
    attempt.merged().finish()
    assert attempt.shown() == b"[0-15] hello\n[0:3] three\n[1:12] twelve\n"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"ranks": {0, 2}}, b"[0,2] X\n[0:0] 0\n[1:2] 2\n"),
        ({"nodes": {1}}, b"[2-3] X\n[1:2] 2\n[1:3] 3\n"),
        ({"ranks": {1, 2}, "nodes": {1}}, b"[1:2] X\n[1:2] 2\n"),
        ({"ranks": {9}}, b""),
    ],
)
def test_filters(attempt: FakeAttempt, options: dict[str, object], shown: bytes) -> None:
    for rank in range(4):
        attempt.write(rank, b"X\n%d\n" % rank, node=rank // 2)
    attempt.tick(50)
    attempt.path(1).write_bytes(attempt.path(1).read_bytes())
    attempt.merged(**options).finish()
    assert attempt.shown() == shown


def test_a_flood_is_read_in_turns(attempt: FakeAttempt) -> None:
    for rank in range(3):
        attempt.write(rank, b"".join(b"%07d %s\n" % (line, b"x" * 91) for line in range(50_000)))
        attempt.write(rank, b"own %d\n" % rank, "err")
    attempt.tick(50)
    attempt.merged().finish()
    lines = attempt.out.data.splitlines()
    assert len(lines) == 50_000
    assert all(line.startswith(b"[0-2] ") for line in lines)
    assert attempt.err.data == b"[0] own 0\n[1] own 1\n[2] own 2\n"


def test_thousand_ranks_need_no_thousand_open_files(attempt: FakeAttempt) -> None:
    for rank in range(1024):
        attempt.write(rank, b"X\n")
    attempt.tick(50)
    before = len(list(Path("/proc/self/fd").iterdir()))
    merged = attempt.merged()
    merged.pump()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    merged.finish()
    assert attempt.shown() == b"[0-1023] X\n"


def per_rank(shown: bytes) -> dict[int, list[bytes]]:
    got: dict[int, list[bytes]] = defaultdict(list)
    for line in shown.splitlines():
        match = re.match(rb"\[(?:\d+:)?([\d,-]+)\] (.*)", line)
        assert match, line
        for part in match[1].decode().split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                got[rank].append(match[2])
    return got


steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 3), st.text("abc\n", max_size=8)),
        st.tuples(st.just("tick"), st.integers(1, 120), st.just("")),
        st.tuples(st.just("pump"), st.integers(0, 120), st.just("")),
    ),
    max_size=40,
)
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def play(folder: Path, plan: list[tuple[str, int, str]], live: bool, **options: object) -> bytes:
    attempt = FakeAttempt(folder)
    merged = attempt.merged(nnodes=2, **options)
    for verb, number, text in plan:
        if verb == "write":
            attempt.write(number, text.encode(), node=number // 2)
        elif verb == "tick":
            attempt.tick(number)
        elif live:
            merged.pump()
    if live:
        merged.finish()
    attempt.close()
    if not live:
        merged.finish()
    return attempt.shown()


def written(plan: list[tuple[str, int, str]]) -> dict[int, list[bytes]]:
    wrote: dict[int, str] = defaultdict(str)
    for verb, number, text in plan:
        if verb == "write":
            wrote[number] += text
    return {rank: text.encode().splitlines() for rank, text in wrote.items() if text}


@quick
@given(plan=steps, fold=st.booleans(), live=st.booleans(), world=st.sampled_from([None, 4]))
def test_nothing_is_lost_doubled_or_turned_around(
    tmp_path_factory: pytest.TempPathFactory,
    plan: list[tuple[str, int, str]],
    fold: bool,
    live: bool,
    world: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    assert per_rank(play(folder, plan, live, fold=fold, world_size=world)) == written(plan)


@quick
@given(plan=steps)
def test_following_shows_what_reading_afterwards_shows(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[str, int, str]]
) -> None:
    plan = [*plan, ("tick", 50, "")]
    folder = tmp_path_factory.mktemp("run")
    live = play(folder, plan, True)
    again = FakeAttempt(folder)
    again.merged(nnodes=2).finish()
    assert live == again.shown()


@quick
@given(order=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 100)), max_size=20), fold=st.booleans())
def test_lines_that_do_not_fold_follow_the_index(
    tmp_path_factory: pytest.TempPathFactory, order: list[tuple[int, int]], fold: bool
) -> None:
    attempt = FakeAttempt(tmp_path_factory.mktemp("run"))
    for number, (rank, later) in enumerate(order):
        attempt.write(rank, b"%d\n" % number)
        attempt.tick(later)
    attempt.close()
    attempt.merged(fold=fold).finish()
    assert attempt.shown() == b"".join(b"[%d] %d\n" % (rank, n) for n, (rank, _) in enumerate(order))


def test_what_is_pending_is_counted_off_again(attempt: FakeAttempt) -> None:
    for rank in range(3):
        attempt.write(rank, b"X\n\nown %d\nX\n" % rank)
        attempt.write(rank, b"error\n", "err")
    attempt.tick(50)
    merged = attempt.merged()
    merged.pump()
    merged.finish()
    assert merged._pending_bytes == 0
    assert attempt.shown() == b"[0-2] X\n[0-2] \n[0] own 0\n[1] own 1\n[2] own 2\n[0-2] X\n[0-2] error\n"


RAISED = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    step()
  File "/home/me/allranks/.venv/lib/site-packages/torch/nn/linear.py", line 134, in forward
    return F.linear(input)
           ^^^^^^^^^^^^^^^
  File "/opt/site-packages/lightning.py", line 2, in wrapped
    wrapped()
  [Previous line repeated 3 more times]
  File "/usr/lib/python3.11/runpy.py", line 88, in run
  File "/home/me/net.py", line 4, in step
    return rows

  File "/opt/site-packages/torch/functional.py", line 4, in cat
    return _VF.cat()
RuntimeError: shapes differ
"""
FOLDED = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    step()
  … 3 frames in torch, lightning, python
  File "/home/me/net.py", line 4, in step
    return rows

  … 1 frame in torch
RuntimeError: shapes differ
"""


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("fold_frames", "shown"), [(False, RAISED), (True, FOLDED)])
def test_a_traceback_of_all_ranks_is_shown_once(
    attempt: FakeAttempt, fold_frames: bool, shown: str, at_once: bool
) -> None:
    """Torch puts the rank before each line, once there is a process group."""
    merged = attempt.merged(form=LineForm(fold_frames=fold_frames))
    lines = RAISED.splitlines(keepends=True)
    for part in [lines] if at_once else [lines[:4], lines[4:5], lines[5:14], lines[14:]]:
        for rank in range(4):
            text = "".join(f"[rank{rank}]: {line}" if line.strip() else line for line in part)
            attempt.write(rank, text.encode(), "err")
        attempt.tick(50)
        merged.pump()
    merged.finish()
    assert attempt.err.data.decode() == "".join(f"[0-3] {line}" for line in shown.splitlines(keepends=True))


def test_frames_at_the_end_of_a_log_are_counted(attempt: FakeAttempt) -> None:
    attempt.write(0, RAISED[: RAISED.index("RuntimeError")].encode(), "err")
    attempt.tick(50)
    attempt.merged(form=LineForm(fold_frames=True)).finish()
    assert attempt.shown().decode().endswith("\n[0]   … 1 frame in torch\n")


def test_the_rank_of_another_is_no_prefix(attempt: FakeAttempt) -> None:
    attempt.write(1, b"[rank0]: said so\nand [rank1]: this\n", "err")
    attempt.tick(50)
    attempt.merged().finish()
    assert attempt.shown() == b"[1] [rank0]: said so\n[1] and [rank1]: this\n"
