from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

import pytest
from fake_attempt import FakeAttempt, Step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allranks import contract
from allranks.logs.merge import HOLD
from allranks.logs.streams import LONGEST

NODE = contract.ALL_OF_A_NODE
STEPS = [step for number in range(20) for step in ((0, b"step %d\n" % number), 50, (1, b"step %d\n" % number))]
OF_NODES = [*((rank, b"hello\n", "out", rank // 8) for rank in range(16)), (3, b"3\n"), (12, b"12\n", "out", 1), 50]
BY_TIME = [(1, b"a\n"), 50, (0, b"b\n"), 50, (1, b"c\nd\n"), 50, (0, b"e\n"), 50]
#: What ranks write, with the ms between, and what is shown then.
MERGED = {
    "by time, not by rank": (BY_TIME, b"[1] a\n[0] b\n[1] c\n[1] d\n[0] e\n"),
    "equal lines a tick apart": ([(0, b"A\nX\n"), 50, (1, b"X\n"), 50], b"[0] A\n[0-1] X\n"),
    "equal lines much later": ([(0, b"X\n"), 50, (1, b"X\n"), HOLD + 1], b"[0] X\n[1] X\n"),
    "equal lines on both streams": ([(0, b"X\n"), (1, b"X\n", "err"), 50], b"[0] X\n[1] X\n"),
    "equal lines that ticks cut apart": ([*STEPS, 50], b"".join(b"[0-1] step %d\n" % step for step in range(20))),
    "unfinished last lines": ([(0, b"X"), (1, b"X"), 50], b"[0-1] X\n"),
    "bytes that are not UTF-8": ([(0, b"\xff\xfe \x80\x00\n"), 50], b"[0] \xff\xfe \x80\x00\n"),
    "two nodes": (OF_NODES, b"[0-15] hello\n[0:3] 3\n[1:12] 12\n"),
    "one file for a node": ([(NODE, b"X\n", "out", 0), (NODE, b"X\n", "out", 1), 50], b"[node 0-1] X\n"),
    "another rank, as torch writes it": (
        [(1, b"[rank0]: X\nand [rank1]: Y\n", "err"), 50],
        b"[1] [rank0]: X\n[1] and [rank1]: Y\n",
    ),
}


@pytest.mark.parametrize(("steps", "shown"), MERGED.values(), ids=MERGED)
def test_lines_are_merged(attempt: FakeAttempt, steps: list[Step], shown: bytes) -> None:
    attempt.play(*steps)
    attempt.merged().finish()
    assert attempt.shown() == shown


def test_equal_lines_stay_apart_where_they_are_not_to_fold(attempt: FakeAttempt) -> None:
    attempt.play((0, b"X\nY\n"), (1, b"X\n"), 50)
    attempt.merged(fold=False).pump()
    assert attempt.shown() == b"[0] X\n[0] Y\n[1] X\n"


def test_what_all_ranks_of_a_node_wrote_into_one_file_is_the_nodes(attempt: FakeAttempt) -> None:
    attempt.play((NODE, b"a\n"), 50, (NODE, b"b\n", "err"), 50, (NODE, b"nobody noted this\n"))
    attempt.merged().finish()
    assert attempt.shown() == b"[node 0] a\n[node 0] b\n[node 0] nobody noted this\n"
    attempt.merged(ranks=[0]).finish()
    assert attempt.shown() == b""


@pytest.mark.parametrize("fold", [True, False])
def test_stdout_and_stderr_go_apart_in_one_order(attempt: FakeAttempt, fold: bool) -> None:
    attempt.play((0, b"out 1\n"), (1, b"err 1\n", "err"), 50, (0, b"err 2\n", "err"), 50, (0, b"out 2\n"), 50)
    attempt.merged(fold=fold).finish()
    assert attempt.shown() == b"[0] out 1\n[1] err 1\n[0] err 2\n[0] out 2\n"
    assert attempt.out.data == b"[0] out 1\n[0] out 2\n"
    assert attempt.err.data == b"[1] err 1\n[0] err 2\n"


def test_a_lone_line_waits_only_for_a_moment(attempt: FakeAttempt) -> None:
    merged = attempt.merged()
    attempt.play((0, b"X\n"), 50)
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
    attempt.play((0, b"X\nA\n"), (1, b"X\n"), 0)
    merged.pump()
    assert attempt.shown() == b"[0-1] X\n"
    merged.finish()
    assert attempt.shown() == b"[0] A\n"


@pytest.mark.parametrize("options", [{"ranks": {1}}, {"world_size": 1}])
def test_a_single_rank_waits_for_nobody(attempt: FakeAttempt, options: dict[str, object]) -> None:
    merged = attempt.merged(**options)
    attempt.play((1, b"X\n"), 0)
    merged.pump()
    assert attempt.shown() == b"[1] X\n"


def test_an_unfinished_line_is_held_back(attempt: FakeAttempt) -> None:
    merged = attempt.merged(fold=False)
    attempt.play((0, b"half"), 50)
    merged.pump()
    assert attempt.shown() == b""
    attempt.play((0, b" whole\nend"), (1, b"x\n"), 50)
    merged.pump()
    assert attempt.shown() == b"[0] half whole\n[1] x\n"
    merged.finish()
    assert attempt.shown() == b"[0] end\n"


def test_10_mb_without_a_newline(attempt: FakeAttempt) -> None:
    merged = attempt.merged()
    attempt.play((0, b"x" * 10_000_000), (1, b"y\n"), 50)
    merged.pump()
    merged.finish()
    lines = attempt.out.data.splitlines()
    assert sorted({len(line) for line in lines if line.startswith(b"[0]")}) == [
        4 + 10_000_000 % LONGEST,
        4 + LONGEST,
    ]
    assert sum(len(line) - 4 for line in lines if line.startswith(b"[0] ")) == 10_000_000
    assert b"[1] y" in lines


def test_progress_bar(attempt: FakeAttempt) -> None:
    merged = attempt.merged(fold=False)
    assert merged.transient() is None
    attempt.play((0, b"\r10%", "err"), 50)
    merged.pump()
    assert (attempt.shown(), merged.transient()) == (b"", b"[0] 10%")
    attempt.play((1, b"\r15%", "err"), 50, (0, b"text\n"), 50)
    merged.pump()
    assert (attempt.shown(), merged.transient()) == (b"[0] text\n", b"[1] 15%")
    attempt.play((1, b"\r100%\n", "err"), 50)
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
    attempt.play((0, b"a\n"), 50, (0, b"z\n"))
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
    attempt.play((0, b"a\n"), 50)
    merged.pump()
    attempt.play((8, b"b\n", "out", 1), (1, b"c\n", "err"), 50)
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
    attempt.play((0, b"one\ntwo\nhalf"), 50)
    merged.pump()
    assert attempt.shown() == b"[0] one\n[0] two\n"
    os.truncate(attempt.path(0), 0)
    attempt.play((0, b"new\n"), 50)
    merged.pump()
    assert attempt.shown() == b"[0] half\n[0] new\n"
    os.truncate(attempt.path(0), 0)
    merged.finish()
    assert attempt.shown() == b""
    attempt.merged().finish()
    assert attempt.shown() == b""


def test_a_log_that_shrank_before_it_was_read(attempt: FakeAttempt) -> None:
    attempt.play((0, b"one\ntwo\n"), 50)
    os.truncate(attempt.path(0), 0)
    attempt.play((0, b"new\n"), 50, (0, b"and\nmore\n"), 50)
    attempt.merged().finish()
    assert attempt.shown() == b"[0] new\n[0] and\n[0] more\n"


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
