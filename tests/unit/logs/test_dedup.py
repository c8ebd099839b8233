from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.logs.dedup import Dedup, LogBlock, LogSource
from allranks.logs.lineform import Prefixes, ranges


def block(lines: Iterable[str | bytes]) -> bytes:
    return b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)


def letters(text: bytes) -> str:
    return text.replace(b"\n", b"").decode()


def fold(*texts: str, everyone: int | None = None) -> str:
    """Fold one line a letter: rank 0 writes the first text, and so on."""
    folded = Dedup()
    for rank, text in enumerate(texts):
        if text:
            folded.add(LogSource(rank, 0), 0, block(text))
    runs = folded.flush(0) if everyone is None else folded.common(everyone)
    return " ".join(f"{ranges(s.rank for s in run.sources)}:{letters(run.text)}" for run in runs)


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["A"], "0:A"),
        (["AB", "CD"], "0:AB 1:CD"),
        (["AB", "AB"], "0-1:AB"),
        (["AX", "X"], "0:A 0-1:X"),
        (["X", "AX"], "1:A 0-1:X"),
        (["AXB", "CXD"], "0:A 1:C 0-1:X 0:B 1:D"),
        (["X", "Y", "X", "X"], "0,2-3:X 1:Y"),
        (["AB", "BA"], "0:A 0-1:B 1:A"),
        (["XX", "X"], "0-1:X 0:X"),
        (["XAX", "XBX"], "0-1:X 0:A 1:B 0-1:X"),
        (["AXY", "XYB", "CX"], "0:A 2:C 0-2:X 0-1:Y 1:B"),
        (["ABC", "BCA", "CAB"], "0:A 0-1:B 0-2:C 1-2:A 2:B"),
        (["", "A", ""], "1:A"),
    ],
)
def test_folding(texts: list[str], shown: str) -> None:
    assert fold(*texts) == shown


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["AB", "AB"], "0-1:AB"),
        (["AB", "AC"], "0-1:A"),
        (["A", "B"], ""),
        (["A"], ""),
        (["AB", "A"], "0-1:A"),
    ],
)
def test_what_all_have_need_not_wait(texts: list[str], shown: str) -> None:
    assert fold(*texts, everyone=2) == shown


def test_lines_that_are_not_due_wait() -> None:
    folded = Dedup()
    folded.add(LogSource(0, 0), 10, block([b"A"]))
    folded.add(LogSource(1, 0), 20, block([b"B"]))
    assert folded.flush(9) == []
    assert folded.flush(10) == [LogBlock(10, (LogSource(0, 0),), b"A\n")]
    assert folded.oldest() == 20
    assert folded.flush(20) == [LogBlock(20, (LogSource(1, 0),), b"B\n")]
    assert folded.oldest() is None


def test_a_due_line_pulls_what_stands_before_it_on_others_and_nothing_else() -> None:
    folded = Dedup()
    zero, one, two = (LogSource(rank, 0) for rank in range(3))
    folded.add(zero, 10, block([b"X"]))
    folded.add(one, 20, block([b"A", b"X", b"B"]))
    folded.add(two, 15, block([b"C", b"A", b"D"]))
    assert folded.flush(10) == [
        LogBlock(15, (two,), b"C\n"),
        LogBlock(20, (one, two), b"A\n"),
        LogBlock(20, (zero, one), b"X\n"),
    ]
    assert folded.flush(99) == [LogBlock(15, (two,), b"D\n"), LogBlock(20, (one,), b"B\n")]


def test_order_follows_arrival() -> None:
    folded = Dedup()
    folded.add(LogSource(1, 0), 10, block([b"A"]))
    folded.add(LogSource(0, 0), 20, block([b"B"]))
    folded.add(LogSource(1, 0), 30, block([b"C"]))
    assert [run.text for run in folded.flush(30)] == [b"A\n", b"B\n", b"C\n"]


def test_a_long_skewed_run_is_emitted_together() -> None:
    common = [b"%d" % number for number in range(1000)]
    folded = Dedup()
    folded.add(LogSource(0, 0), 0, block([b"A", *common]))
    folded.add(LogSource(1, 0), 0, block(common))
    both = (LogSource(0, 0), LogSource(1, 0))
    assert folded.flush(0) == [LogBlock(0, both[:1], b"A\n"), LogBlock(0, both, block(common))]


def flood(begin: int, rank: object) -> bytes:
    return block(f"rank {rank} line {number} {'x' * 80}" for number in range(begin, begin + 5000))


def test_a_flood_is_compared_only_where_the_first_lines_of_two_ranks_are_equal() -> None:
    folded = Dedup()
    zero, one = LogSource(0, 0), LogSource(1, 0)
    folded.add(zero, 8, flood(8, 0) + b"late\n")
    folded.add(one, 8, flood(8, 1) + b"late\n")
    assert [block.sources for block in folded.flush(8)] == [(zero,), (one,)]  # The price of a flood.
    folded.add(zero, 9, flood(9, "any"))
    folded.add(one, 9, b"early\n" + flood(9, "any"))
    assert folded.flush(9) == [LogBlock(9, (one,), b"early\n"), LogBlock(9, (zero, one), flood(9, "any"))]


def test_little_is_compared_whole() -> None:
    folded = Dedup()
    zero, one = LogSource(0, 0), LogSource(1, 0)
    few = block(str(number) * 50 for number in range(1000, 2000))
    folded.add(zero, 9, few + b"late\n")
    folded.add(one, 9, b"late\n")
    assert folded.flush(9) == [LogBlock(9, (zero,), few), LogBlock(9, (zero, one), b"late\n")]


def test_what_is_not_due_stays_in_order_behind_what_was_looked_at() -> None:
    folded = Dedup()
    zero, one = LogSource(0, 0), LogSource(1, 0)
    folded.add(zero, 1, b"A\nX\n")
    folded.add(zero, 2, b"B\n")
    folded.add(one, 2, b"X\nC\n")
    assert folded.flush(1) == [LogBlock(1, (zero,), b"A\n"), LogBlock(2, (zero, one), b"X\n")]
    folded.add(one, 3, b"D\n")
    folded.add(zero, 3, b"E\n")
    texts = [(run.sources, run.text) for run in folded.flush(3)]
    assert texts == [((zero,), b"B\n"), ((one,), b"C\n"), ((zero,), b"E\n"), ((one,), b"D\n")]


texts = st.lists(st.tuples(st.integers(0, 3), st.text("ABCDE", max_size=4), st.integers(0, 3)), max_size=20)


@given(texts, st.booleans())
def test_each_rank_keeps_its_lines_and_their_order(adds: list[tuple[int, str, int]], early: bool) -> None:
    folded = Dedup()
    wrote: dict[int, str] = defaultdict(str)
    got: dict[int, str] = defaultdict(str)
    now, runs = 0, []
    for rank, text, later in adds:
        now += later
        if text:
            wrote[rank] += text
            folded.add(LogSource(rank, 0), now, block(text))
        runs += folded.flush(now - 4)
        if early:
            runs += folded.common(4)
    runs += folded.flush(now)
    for run in runs:
        assert len(set(run.sources)) == len(run.sources)
        for source in run.sources:
            got[source.rank] += letters(run.text)
    assert got == wrote


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "3"), ([0, 1], "0-1"), ([0, 2, 3], "0,2-3"), ([7, 0, 1, 2], "0-2,7"), (range(16), "0-15")],
)
def test_ranges(ranks: list[int], text: str) -> None:
    assert ranges(ranks) == text


def test_prefixes() -> None:
    prefix = Prefixes()
    assert prefix((LogSource(3, 1),)) == b"[3] "
    prefix.set_several_nodes(True)
    assert prefix((LogSource(3, 1),)) == b"[1:3] "
    assert prefix((LogSource(3, 1), LogSource(4, 1))) == b"[3-4] "
    assert Prefixes(colour=True)((LogSource(0, 0),)) == b"\x1b[36m[0]\x1b[0m "
