"""A rank's stdout: lines are in the file at once; a flood is flushed together, and nothing of it is lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from allranks.agent.workers.streams import RankStream
from waiting import PATIENCE

FLOOD = "".join(f"line {number}\n" for number in range(5000))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.out"


@pytest.fixture
def stream(log: Path) -> Iterator[RankStream]:
    stream = RankStream(FileIO(log, "w"), "utf-8", "strict")
    yield stream
    stream.close()
    await_calm()


def await_calm() -> None:
    for thread in threading.enumerate():
        if thread.name == "allranks-flush":
            thread.join(PATIENCE)
            assert not thread.is_alive()


def flood(stream: RankStream) -> None:
    for number in range(5000):
        print(f"line {number}", file=stream)


def test_a_line_is_in_the_file_as_soon_as_it_is_printed(stream: RankStream, log: Path) -> None:
    for number in range(5):
        print("step", number, file=stream)
        assert log.read_text() == "".join(f"step {done}\n" for done in range(number + 1))
    assert [thread.name for thread in threading.enumerate() if thread.name == "allranks-flush"] == []


def test_the_end_of_a_flood_is_in_the_file_without_another_line_or_flush(stream: RankStream, log: Path) -> None:
    flood(stream)
    deadline = time.monotonic() + PATIENCE
    while log.read_text() != FLOOD:
        assert time.monotonic() < deadline, log.read_text()[-100:]
    await_calm()


def test_a_flush_that_the_script_asks_for_is_done_at_once_in_a_flood(stream: RankStream, log: Path) -> None:
    for number in range(200):
        print(f"line {number}", file=stream)
        stream.flush()
        assert log.read_text().endswith(f"line {number}\n")


def test_closing_in_a_flood_loses_nothing(stream: RankStream, log: Path) -> None:
    flood(stream)
    stream.close()
    assert log.read_text() == FLOOD


def test_a_fork_in_a_flood_writes_nothing_twice_and_the_child_goes_on(stream: RankStream, log: Path) -> None:
    flood(stream)
    child = os.fork()
    if child == 0:
        flood(stream)
        stream.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    stream.flush()
    assert log.read_text() == FLOOD + FLOOD


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_flood_into_a_pipe_arrives_also_its_end(is_blocking: bool) -> None:
    """A pipe has no position; one that does not block refuses what its reader has not yet made room for."""
    end, own = os.pipe()
    os.set_blocking(own, is_blocking)
    stream = RankStream(FileIO(own, "w"), "utf-8", "strict")
    read: list[bytes] = []
    with open(end, "rb") as pipe:
        reader = threading.Thread(target=lambda: read.extend(iter(pipe.readline, b"last\n")))
        reader.start()
        for count in range(1, 4):  # Each flood begins after the calm that ended the one before.
            flood(stream)
            await_calm()
            deadline = time.monotonic() + PATIENCE
            while len(read) < count * 5000:
                assert time.monotonic() < deadline, read[-1:]
        print("last", file=stream)
        reader.join(PATIENCE)
        assert not reader.is_alive()
    assert b"".join(read).decode() == FLOOD * 3
    stream.close()


def test_a_flood_into_a_pipe_without_a_reader_ends_with_an_error_of_the_script() -> None:
    end, own = os.pipe()
    stream = RankStream(FileIO(own, "w"), "utf-8", "strict")
    for number in range(100):
        print(f"line {number}", file=stream)
    os.close(end)
    with pytest.raises(BrokenPipeError):
        for _ in range(100):
            flood(stream)
    with pytest.raises(BrokenPipeError):
        stream.close()
    await_calm()


def test_a_flood_takes_few_writes(log: Path) -> None:
    class Counting(FileIO):
        writes = 0

        def write(self, data: object) -> int:
            self.writes += 1
            return super().write(data)  # type: ignore[arg-type]

    raw = Counting(log, "w")
    stream = RankStream(raw, "utf-8", "strict")
    flood(stream)
    stream.close()
    await_calm()
    assert log.read_text() == FLOOD
    assert raw.writes < 500


def test_a_disk_that_was_full_in_a_flood_costs_no_line_and_no_liveness(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(FileIO):
        full = False
        refused = threading.Event()

        def write(self, data: object) -> int:
            if self.full:
                self.refused.set()
                raise OSError(28, "No space left on device")
            return super().write(data)  # type: ignore[arg-type]

    raw = Full(log, "w")
    stream = RankStream(raw, "utf-8", "strict")
    filled = threading.Event()  # The flood lasts until its disk is full.
    monkeypatch.setattr(stream._stop, "wait", lambda _: filled.wait(PATIENCE))
    for number in range(100):
        print(f"line {number}", file=stream)
    raw.full = True
    print("while it is full", file=stream)
    filled.set()
    assert raw.refused.wait(PATIENCE)
    raw.full = False
    await_calm()
    print("after", file=stream)
    assert log.read_text() == "".join(f"line {number}\n" for number in range(100)) + "while it is full\nafter\n"
    stream.close()
