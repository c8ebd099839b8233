"""Who sends to whom, when neighbours are measured."""

from __future__ import annotations

import pytest

from allranks.selftest.bandwidth import rings, rounds
from allranks.selftest.collectives import difference


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9])
def test_each_member_has_one_partner_in_a_round_and_all_neighbours_meet_both_ways(count: int) -> None:
    members = [3 * place for place in range(count)]
    found = rounds(members)
    for pairs in found:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len({*ends})
    ring = {(members[place], members[(place + 1) % count]) for place in range(count)}
    ways = [pair for pairs in found for pair in pairs]
    assert sorted(ways) == sorted(ring | {way[::-1] for way in ring})
    assert len(found) <= 6


def test_no_rounds_for_one() -> None:
    assert rounds([0]) == []


@pytest.mark.parametrize(
    ("node_of", "expected"),
    [
        ([0, 0, 0], [[0, 1, 2]]),
        ([0, 1, 2], [[0, 1, 2]]),
        ([0, 0, 1, 1, 2, 2], [[0, 2, 4], [1, 3, 5]]),
        ([1, 0, 1, 0], [[1, 0], [3, 2]]),
        ([0, 0, 0, 1, 2, 2], [[0, 3, 4], [1, 5]]),
    ],
)
def test_each_rank_of_a_node_has_its_ring(node_of: list[int], expected: list[list[int]]) -> None:
    assert rings(node_of) == expected


def test_where_numbers_differ_first() -> None:
    assert difference([1, 2, 3], [1, 2, 3]) == ""
    assert difference([1, 7, 8], [1, 2, 3]) == "number 1 must be 2, and is 7"
