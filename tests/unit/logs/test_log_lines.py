from __future__ import annotations

import pytest
from fake_attempt import FakeAttempt
from hypothesis import given
from hypothesis import strategies as st

from allranks.logs.lineform import LineForm
from allranks.logs.streams import LONGEST, LineCutter


def feed(*chunks: bytes) -> list[bytes]:
    cutter = LineCutter()
    return [*(cutter.feed(chunk) for chunk in chunks), cutter.end()]


@pytest.mark.parametrize(
    ("chunks", "blocks"),
    [
        ([b"a\nb\n"], [b"a\nb\n", b""]),
        ([b"a\nb"], [b"a\n", b"b\n"]),
        ([b"a", b"b", b"c\nd"], [b"", b"", b"abc\n", b"d\n"]),
        ([b"\n\n"], [b"\n\n", b""]),
        ([b"\xff\xfe\x00\n"], [b"\xff\xfe\x00\n", b""]),
        ([b"a\r\nb\r\n"], [b"a\nb\n", b""]),
        ([b"a\r", b"\nb\r\n"], [b"", b"a\nb\n", b""]),
        ([b"\r\n"], [b"\n", b""]),
        ([b"10%\r20%\r30%\n"], [b"30%\n", b""]),
        ([b"\r10%", b"\r20%", b"\r30%\n"], [b"", b"", b"30%\n", b""]),
        ([b"10%\r", b"20%\r", b"\ndone\n"], [b"", b"", b"20%\ndone\n", b""]),
        ([b"10%\r   \rdone\n"], [b"done\n", b""]),
        ([b"10%\r   \r", b"   \n"], [b"", b"", b""]),
        ([b"10%\r20%"], [b"", b"20%\n"]),
        ([b"10%\r20%\r"], [b"", b"20%\n"]),
        ([b"10%\r   \r"], [b"", b""]),
        ([b"\r10%", b"\r\x1b[K"], [b"", b"", b""]),
        ([b"\r10%\r\x1b[2K\n", b"\r\x1b[K\x1b[32m30%\x1b[0m\n"], [b"", b"\x1b[K\x1b[32m30%\x1b[0m\n", b""]),
        ([b"10%\r\x1b[K"], [b"", b""]),
        ([b"10%\r\x1b[2K\r", b"\x1b[0mdone\n"], [b"", b"\x1b[0mdone\n", b""]),
    ],
)
def test_lines(chunks: list[bytes], blocks: list[bytes]) -> None:
    assert feed(*chunks) == blocks


def test_progress_is_the_text_shown_now() -> None:
    cutter = LineCutter()
    cutter.feed(b"plain")
    assert cutter.progress() is None
    cutter.feed(b" text\r10%")
    assert cutter.progress() == b"10%"
    cutter.feed(b"\r20%\r")
    assert cutter.progress() == b"20%"
    cutter.feed(b"\r")
    assert cutter.progress() == b"20%"
    cutter.feed(b"\n")
    assert cutter.progress() is None


def test_a_bar_that_runs_for_hours_takes_no_memory() -> None:
    cutter = LineCutter()
    for number in range(10_000):
        assert cutter.feed(b"\r%d " % number + b"#" * 1000) == b""
    assert len(cutter._rest) < 2000
    assert cutter.feed(b"\n") == b"9999 " + b"#" * 1000 + b"\n"


def test_an_endless_line_comes_in_pieces() -> None:
    chunks = [b"x" * LONGEST] * 10
    blocks = feed(*chunks)
    assert blocks == [b""] + [b"x" * LONGEST + b"\n"] * 9 + [b"x" * LONGEST + b"\n"]


def test_a_line_of_just_the_limit_stays_whole() -> None:
    assert feed(b"x" * LONGEST, b"\ny\n") == [b"", b"x" * LONGEST + b"\ny\n", b""]


@pytest.mark.parametrize("parts", [1, 3])
def test_pieces_do_not_split_a_character(parts: int) -> None:
    text = ("x" + "€" * 700_000).encode()
    cutter = LineCutter()
    size = LONGEST // parts
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    pieces = b"".join([*(cutter.feed(chunk) for chunk in chunks), cutter.feed(b"\n")]).split(b"\n")[:-1]
    assert b"".join(pieces) == text
    assert [len(piece) for piece in pieces] == [1_048_576, 1_048_575, 2_850]
    for piece in pieces:
        piece.decode()


def test_pieces_of_bytes_that_are_no_text() -> None:
    assert feed(b"\x80" * LONGEST, b"\x80" * 5 + b"\n") == [
        b"",
        b"\x80" * LONGEST + b"\n" + b"\x80" * 5 + b"\n",
        b"",
    ]


@given(st.lists(st.binary(max_size=12)), st.data())
def test_chunks_make_no_difference(texts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(text.replace(b"\x00", b"\n").replace(b"\x01", b"\r") for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    chunks = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert b"".join(feed(*filter(None, chunks))) == b"".join(feed(whole))


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

  File "/opt/site-packages/torch/wrapped.py", line 3, in wrapped
    cat()
  File "/opt/site-packages/torch/functional.py", line 4, in cat
    return _VF.cat()
           ^^^^^^^^^
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
  File "/opt/site-packages/torch/functional.py", line 4, in cat
    return _VF.cat()
           ^^^^^^^^^
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


def test_frames_at_the_end_of_a_log_are_counted_but_for_the_last(attempt: FakeAttempt) -> None:
    attempt.play((0, RAISED[: RAISED.index("RuntimeError")].encode(), "err"), 50)
    attempt.merged(form=LineForm(fold_frames=True)).finish()
    last = "".join(f"[0] {line}" for line in FOLDED.splitlines(keepends=True)[-4:-1])
    assert attempt.shown().decode().endswith(f"[0]   … 1 frame in torch\n{last}")
