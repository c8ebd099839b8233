"""Places in the order of ranks: who keeps one, and who takes that of a node that is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meetings import orders

from allranks import contract
from allranks.agent.nodes.coordinator import filled, not_started


@pytest.mark.parametrize(
    ("places", "ready", "expected"),
    [
        ([0, 1, 2], [0, 1, 2], [0, 1, 2]),
        ([0, 1, 2], [0, 1, 2, 3], [0, 1, 2]),
        ([0, 1, 2], [0, 2, 3, 4], [0, 3, 2]),
        ([0, 1, 2], [0, 4, 3], [0, 3, 4]),
        ([0, 1, 2], [0, 2], [0, 1, 2]),
        ([0, 3, 2], [0, 1, 2], [0, 1, 2]),
    ],
)
def test_spares_fill_places(places, ready, expected):
    assert filled(places, ready) == expected


@given(st.permutations(range(6)), st.integers(1, 6), st.sets(st.integers(0, 5)))
def test_who_is_ready_keeps_its_place_and_no_spare_waits_while_one_is_free(nodes, count, ready):
    places = nodes[:count]
    found = filled(places, ready)
    assert len(found) == len({*found}) == count
    assert all(now == before for before, now in zip(places, found, strict=True) if before in ready)
    assert {*found} <= ready or ready <= {*found}


def test_who_was_not_started_is_read_when_it_is_whole(tmp_path: Path):
    spec = orders(run_dir=str(tmp_path), nnodes=3, min_nodes=2)
    assert not_started(spec) == {}
    path = tmp_path / "attempts" / "002" / "node-000" / contract.NOT_STARTED
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"node": 1, "host": "gpu1", "why": "no route"}) + "\n")
    assert not_started(spec) == {1: ("node 1 (gpu1)", "no route")}
    assert not_started(replace(spec, min_nodes=3)) == {}
    path.write_text('{"node": 1, "ho')
    assert not_started(spec) == {}
