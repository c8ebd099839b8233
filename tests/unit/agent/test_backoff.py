"""How long restarts wait."""

from __future__ import annotations

import time

from allranks.agent.workers.group import Backoff


def test_three_thousand_failures_in_a_row_wait_no_longer_than_a_minute():
    backoff = Backoff(1.0)
    delays = [backoff.delay(time.monotonic()) for _ in range(3000)]
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0] + [60.0] * 2993


def test_without_a_delay_no_restart_waits():
    backoff = Backoff(0.0)
    assert [backoff.delay(time.monotonic()) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_ranks_that_ran_for_more_than_a_minute_begin_the_row_again():
    backoff, now = Backoff(3.0), time.monotonic()
    starts = (now, now, now - 61, now, now)
    assert [backoff.delay(started) for started in starts] == [0.0, 3.0, 0.0, 3.0, 6.0]
