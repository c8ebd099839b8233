"""Who sends to whom, when neighbours are measured; and what ranks of two nodes measure: both are this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from reported import reports_of

from allranks.record.selftest import Link
from allranks.selftest.collectives import difference, rings, rounds
from warm_python import WarmPython

MEASURE = """
import sys
import allranks
from allranks.record.selftest import send
from allranks.selftest import collectives

collectives._ENOUGH = float(sys.argv[1])
with allranks.init(backend="gloo") as ctx:
    for link in collectives.links(ctx):
        send(link)
"""


def measured(folder: Path, warm_ranks: WarmPython, enough: float) -> list[tuple[int, int]]:
    """Have two nodes of two ranks measure; return which ranks have sent to which."""
    told = reports_of(MEASURE, [enough], folder, warm_ranks, 4, 2)
    assert all(isinstance(link, Link) and link.seconds > 0 and link.size >= 1 << 16 for link in told)
    return [(link.rank, link.target) for link in told if isinstance(link, Link)]


@pytest.mark.parametrize(("enough", "further"), [(60.0, [(1, 3), (3, 1)]), (0.0, [])])
def test_each_rank_sends_to_the_same_of_the_next_node(
    tmp_path: Path, warm_ranks: WarmPython, enough: float, further: list[tuple[int, int]]
) -> None:
    assert sorted(measured(tmp_path, warm_ranks, enough)) == sorted([(0, 2), (2, 0), *further])


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
