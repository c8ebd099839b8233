"""GPUs that something slows down: which are named, with what evidence, and which are not."""

from __future__ import annotations

from typing import Any

import pytest

from allranks.runs.usage import slow_gpus

RANKS = {0: 8, 1: 9}


def _gpu(clock: int | None, *slowed_by: str, highest: int = 1980) -> dict[str, Any]:
    return {"clock": clock, "max_clock": highest, "slowed_by": [*slowed_by]}


def _nodes(*clocks: list[dict[str, Any]], when: float = 100.0) -> list[dict[str, Any]]:
    return [
        {
            "node": node,
            "host": f"gpu{node:02d}",
            "time": when,
            "gpus": [{"number": number, **gpu} for number, gpu in enumerate(gpus)],
        }
        for node, gpus in enumerate(clocks)
    ]


def _said(nodes: list[dict[str, Any]], ranks: dict[int, int]) -> list[str]:
    return [one.sentence(ranks) for one in slow_gpus(nodes)]


def test_a_hot_gpu_is_named_by_its_rank() -> None:
    nodes = _nodes([_gpu(1755), _gpu(1755)], [_gpu(1740, "power cap"), _gpu(1110, "thermal")])
    (one,) = slow_gpus(nodes)
    assert (one.node, one.host, one.numbers) == (1, "gpu01", (1,))
    clocks = "1.11 GHz (thermal), the others at 1.75 GHz"
    assert one.sentence(RANKS) == f"the GPU of rank 9 on gpu01 runs at {clocks}"
    assert one.sentence({}) == f"GPU 1 of gpu01 runs at {clocks}", "without an agent the ranks are not known"


def test_of_a_node_that_lacks_power_all_are_one_sentence_and_come_first() -> None:
    slow = [_gpu(990, "power brake"), _gpu(1005, "power brake")]
    nodes = _nodes([_gpu(1755), _gpu(1755)], [_gpu(1755), _gpu(1200, "thermal")], slow, [_gpu(1755), _gpu(1755)])
    assert _said(nodes, RANKS) == [
        "2 GPUs of gpu02 run at 0.99 GHz (power brake), the others at 1.75 GHz",
        "the GPU of rank 9 on gpu01 runs at 1.2 GHz (thermal), the others at 1.75 GHz",
    ]


def test_one_of_two_gpus() -> None:
    assert _said(_nodes([_gpu(1755), _gpu(1400, "thermal")]), {}) == [
        "GPU 1 of gpu00 runs at 1.4 GHz (thermal), the others at 1.75 GHz"
    ]


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        _nodes([]),
        _nodes([_gpu(900, "thermal")]),
        _nodes([_gpu(900, "thermal"), _gpu(900, "thermal")]),
        _nodes([_gpu(1755), _gpu(1500, "power cap")]),
        _nodes([_gpu(1755), _gpu(300)]),
        _nodes([_gpu(1755), _gpu(None)]),
        _nodes([_gpu(1755, highest=1980), _gpu(1250, "power cap", highest=1410)]),
        _nodes([_gpu(1755)]) + _nodes([_gpu(900, "thermal")], when=60.0),
    ],
    ids=[
        "no node",
        "no GPU",
        "the only one",
        "all of them",
        "a little slower",
        "idle",
        "not reported",
        "another model",
        "an old sample",
    ],
)
def test_others_are_not_named(nodes: list[dict[str, Any]]) -> None:
    assert slow_gpus(nodes) == []
