"""Time and cost of steps, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.estimate.arithmetic import Pace, from_numbers, paces, rows
from allranks.estimate.network import Network

#: 1,000 parameters of 4 bytes; two ranks send 4,000 bytes of gradients, four 6,000.
NEEDS = from_numbers(1000, "fp32", "sgd", 0)
SLOW = Network("slow", 1000.0, "both")


def test_a_rank_with_fewer_samples_computes_for_less_time() -> None:
    needs = replace(NEEDS, batch=16, global_batch=32)
    found = rows(needs, [2, 4], 1, [SLOW])
    by_ddp = [pace for row, pace in zip(found, paces(needs, found, 8.0, 3600.0), strict=True) if row.strategy == "ddp"]
    assert by_ddp == [
        Pace(step_seconds=8.0 + 4.0, speedup=1.0, cost=1000 * 12.0 * 2),
        Pace(step_seconds=4.0 + 6.0, speedup=pytest.approx(1.2), cost=1000 * 10.0 * 4),
    ]


def test_more_ranks_with_the_same_batch_each_have_more_samples() -> None:
    needs = replace(NEEDS, batch=16)
    found = rows(needs, [1, 4], 1, [SLOW])
    one, four = [p for row, p in zip(found, paces(needs, found, 6.0, None), strict=True) if row.strategy == "ddp"]
    assert (one, four) == (Pace(6.0, 1.0), Pace(12.0, pytest.approx(2.0)))


def test_what_an_unknown_network_takes_is_unknown() -> None:
    found = rows(NEEDS, [1, 2], 1, [])
    assert paces(NEEDS, found, 1.0, 1.0)[1:] == [Pace(), Pace()]
