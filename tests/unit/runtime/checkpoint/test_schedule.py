"""``every``, and the steps at which ranks agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import RankError
from allranks.runtime.checkpoint.schedule import SaveSchedule, parse_every, parse_time

UNITS = {"s": 1, "sec": 1, "seconds": 1, "m": 60, "min": 60, "minutes": 60, "h": 3600, "hour": 3600, "d": 86400}


@given(st.integers(1, 10**9), st.sampled_from(["", " steps", "steps", " step", "  STEPS "]))
def test_steps(number, unit):
    assert parse_every(f"{number}{unit}" if unit else number) == (number, None)


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_times(number, unit, space):
    assert parse_every(f"{number}{space}{unit}") == (None, number * UNITS[unit])


def test_others():
    assert parse_every(None) == (None, None)
    assert parse_every("1.5 h") == (None, 5400)


@pytest.mark.parametrize(
    "every",
    [0, -1, True, 1.5, "", "10", "min", "0 steps", "1.5 steps", "0s", "-5min", "10 parsecs", "1e3 s", [], "٣min"],
)
def test_what_makes_no_sense_is_refused(every):
    with pytest.raises(RankError, match="neither a number of steps nor a span of time"):
        parse_every(every)


@given(st.lists(st.integers(0, 10**8), min_size=1, max_size=30))
def test_the_distance_grows_slowly_and_shrinks_at_once(times):
    schedule = SaveSchedule()
    step = before = 0
    for microseconds in times:
        schedule.plan(step, microseconds, 0.5)
        distance = schedule.next - step
        assert 1 <= distance <= min(256, max(1, 2 * before, 2))
        assert distance == 1 or distance * microseconds <= 500_000
        step, before = schedule.next, distance


def test_spans_of_time():
    assert parse_time("leave_before", "90 s") == 90
    assert parse_time("leave_before", "2min") == 120


@pytest.mark.parametrize("value", [90, "90", "3 steps", "", None])
def test_what_is_no_span_of_time_is_refused(value):
    with pytest.raises(RankError, match=r"invalid span of time: leave_before=.*"):
        parse_time("leave_before", value)
