from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_attempt import FakeAttempt

from allranks.logs.merge import INTERVAL, Tail, follow


def test_follows_until_the_end(attempt: FakeAttempt) -> None:
    merged = attempt.merged(fold=False)
    seen: list[bytes] = []

    def wait(seconds: float) -> None:
        assert seconds == INTERVAL
        seen.append(attempt.shown())
        attempt.write(0, b"%d\n" % len(seen))
        if len(seen) < 3:
            attempt.tick(20)

    follow(merged, lambda: len(seen) == 3, wait)
    assert seen == [b"", b"[0] 1\n", b"[0] 2\n"]
    assert attempt.shown() == b"[0] 3\n"


def test_steps_can_be_wrapped(attempt: FakeAttempt) -> None:
    merged = attempt.merged(fold=False)
    calls: list[str] = []

    def around(step: Callable[[], None]) -> None:
        calls.append(step.__name__)
        step()

    follow(merged, lambda: bool(calls), lambda _: None, around=around)
    assert calls == ["pump", "finish"]


@pytest.mark.parametrize(
    ("lines", "shown"),
    [(0, b""), (1, b"[1] e\n"), (3, b"[0] b\n[0] d\n[1] e\n"), (9, b"[0] a\n[0] b\n[0] d\n[1] e\n")],
)
def test_tail(attempt: FakeAttempt, lines: int, shown: bytes) -> None:
    attempt.play((0, b"a\nb\n"), 500, (0, b"d\n", "err"), 500, (1, b"e\n"), 500)
    merged = attempt.merged()
    tail = Tail(lines)
    merged.out, merged.err = tail.out, tail.err
    merged.finish()
    tail.write(attempt.out.write, attempt.err.write)
    assert attempt.shown() == shown
    tail.write(attempt.out.write, attempt.err.write)
    assert attempt.shown() == b""


@pytest.mark.parametrize(
    ("hurries", "shown"), [(4, b"[0] a\n[1] b\n[0] c\n[0] d\n"), (3, b"[1] b\n[0] a\n[0] c\n[0] d\n")]
)
def test_what_came_at_once_is_read_in_a_piece_of_each_log(attempt: FakeAttempt, hurries: int, shown: bytes) -> None:
    attempt.play((0, b"a\n"), 500, (1, b"b\n"), 500, (0, b"c\n"), 500, (0, b"d\n"), 500)
    attempt.merged(hurries=hurries).finish()
    assert attempt.shown() == shown


def test_a_log_that_was_cut_short_is_read_from_its_start_in_a_hurry(attempt: FakeAttempt) -> None:
    merged = attempt.merged(hurries=1, fold=False)
    attempt.play((0, b"before\n"), 500)
    merged.pump()
    attempt.path(0).write_bytes(b"a\n")
    attempt.play(500, (0, b"b\n"), 500)
    merged.finish()
    assert attempt.shown() == b"[0] before\n[0] a\n[0] b\n"


def test_of_a_long_log_the_end_is_read_in_a_hurry(attempt: FakeAttempt) -> None:
    attempt.play((0, b"first\n" + b"x" * (2 << 20) + b"\nlast\n"), 500)
    attempt.merged(hurries=100).finish()
    assert attempt.shown() == b"[0] " + b"x" * ((1 << 18) - len("\nlast\n")) + b"\n[0] last\n"
