"""Where the time of steps goes: what the clock counts, and the file that it writes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from allranks import contract
from allranks.record.steptime import HEAD, MOST, NEWEST, PHASES, RECORD_BYTES, Place, Window, read_windows
from allranks.runtime import steptime
from allranks.runtime.steptime import CHECKPOINT, COMPUTE, DATA, EXCHANGE, OPTIMIZER, OTHER, StepClock
from waiting import PATIENCE


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Give the time of the clock, which only the test moves on."""
    time = [100.0]
    monkeypatch.setattr(steptime, "perf_counter", lambda: time[0])
    monkeypatch.setattr(steptime, "_WINDOW_SECONDS", 2.0)
    return time


@pytest.fixture
def times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the file to which the clock writes."""
    monkeypatch.setenv(contract.STEP_FILE, str(tmp_path / "rank-3.step"))
    return tmp_path / "rank-3.times"


def step(clock: StepClock, now: list[float], number: int) -> None:
    """Make a step of 1.25 s, as the parts of the runtime do."""
    for phase, seconds in ((DATA, 0.125), (COMPUTE, 0.5), (EXCHANGE, 0.25), (COMPUTE, 0.125), (OPTIMIZER, 0.125)):
        clock.enter(phase)
        now[0] += seconds
    clock.enter(OTHER)
    clock.count(number)
    with clock.during(CHECKPOINT):
        now[0] += 0.0625
    now[0] += 0.0625


def test_windows_hold_all_the_time_of_their_steps(now: list[float], times: Path) -> None:
    clock = StepClock()
    clock.connect(1)
    now[0] += 50.0  # Making the model.
    for number in range(1, 7):
        step(clock, now, number)
    clock.close(6)
    windows = read_windows(times)
    # The first step is not recorded. What follows a step is part of the next one; of the last, its checkpoint.
    assert [(one.first, one.steps, one.restart, one.seconds) for one in windows] == [
        (1, 2, 1, 2.5),
        (3, 2, 1, 2.5),
        (5, 1, 1, 1.3125),
    ]
    assert dict(zip(PHASES, windows[0].spent, strict=True)) == {
        "data": 0.25,
        "compute": 1.25,
        "exchange": 0.5,
        "optimizer": 0.25,
        "checkpoint": 0.125,
        "other": 0.125,
    }
    assert [round(two.start - one.start, 3) for one, two in pairwise(windows)] == [2.5, 2.5]


def test_a_window_holds_the_place_after_its_steps_also_when_it_is_joined(now: list[float], times: Path) -> None:
    clock = StepClock()
    clock.connect(0)
    for number in range(1, 4):
        now[0] += 3.0
        clock.enter(OTHER)
        clock.count(number, lambda left=9 - number: Place(2, 8, left, 9))
    windows = read_windows(times)
    assert [one.place for one in windows] == [Place(2, 8, 7, 9), Place(2, 8, 6, 9)]
    assert windows[0].joined(windows[1]).place == Place(2, 8, 6, 9)


def test_a_window_holds_how_long_its_rank_waited_for_a_cpu(times: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes have one CPU between them, so that each waits about half of the time."""
    monkeypatch.setattr(steptime, "_WINDOW_SECONDS", 0.0)
    cpus, clock = os.sched_getaffinity(0), StepClock()
    clock.connect(0)
    clock.enter(COMPUTE)
    clock.count(1)
    os.sched_setaffinity(0, {min(cpus)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, deadline = _waited(), time.monotonic() + PATIENCE
        while _waited() - before < 0.1 and time.monotonic() < deadline:
            pass
        clock.enter(OTHER)
        clock.count(2)
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cpus)
    (window,) = read_windows(times)
    assert 0.1 <= window.queued <= window.seconds
    assert window.joined(window).queued == 2 * window.queued


def _waited() -> float:
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def test_ranks_that_are_restarted_add_to_the_file(now: list[float], times: Path) -> None:
    for restart in range(2):
        clock = StepClock()
        clock.connect(restart)
        for number in range(1, 4):
            step(clock, now, number)
        clock.close(3)
        now[0] += 10.0
    found = [(one.first, one.steps, one.restart) for one in read_windows(times)]
    assert found == [(1, 2, 0), (1, 2, 1)]


def test_without_an_agent_nothing_is_written(now: list[float], times: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.STEP_FILE, str(times.parent / "gone" / "rank-3.step"))
    clock = StepClock()
    clock.connect(0)  # The directory is not there: the training goes on.
    step(clock, now, 1)
    monkeypatch.delenv(contract.STEP_FILE)
    clock.connect(0)
    step(clock, now, 2)
    clock.close(2)
    assert list(times.parent.iterdir()) == []


def test_a_long_run_has_a_small_file_that_loses_no_step(now: list[float], times: Path) -> None:
    clock, steps = StepClock(), 5000
    clock.connect(0)
    for number in range(1, steps + 1):
        step(clock, now, number)
        now[0] += 1.0  # A step takes longer than a window: one is written for each.
    clock.close(steps)
    windows = read_windows(times)
    assert times.stat().st_size == len(HEAD) + len(windows) * RECORD_BYTES <= len(HEAD) + MOST * RECORD_BYTES
    assert sum(one.steps for one in windows) == steps - 1
    assert [one.first + one.steps for one in windows[:-1]] == [one.first for one in windows[1:]]
    assert sum(one.seconds for one in windows) == pytest.approx((steps - 1) * 2.25)
    assert {one.steps for one in windows[-NEWEST:]} == {1}, "the newest are as they were"


def test_readers_skip_what_is_not_complete_or_not_in_order(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.times"
    assert read_windows(path) == []
    one, two, three = (Window(float(start), start, 2, 0, (0.5,) * len(PHASES)) for start in (2, 4, 6))
    gap = bytes(RECORD_BYTES)  # Not written, as on a full disk.
    path.write_bytes(HEAD + one.to_bytes() + gap + three.to_bytes() + two.to_bytes() + three.to_bytes()[:-1])
    assert read_windows(path) == [one, three]
    assert read_windows(path, newest=3) == [three]
    path.write_bytes(HEAD[:-2])
    assert read_windows(path) == []
    path.write_bytes(b"steps 9\n" + one.to_bytes())
    assert read_windows(path) == []
