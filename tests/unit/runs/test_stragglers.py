"""Stragglers: the right rank for the right reason where there is one, and none where steps only vary."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_steps import missed, named_in_quiet

from allranks.record.steptime import PHASES, Window
from allranks.runs.steptime import RankTimes, of_start, per_step
from allranks.runs.stragglers import Straggler, explained, find, medians_of_others

#: What is said of a rank that computes for 3 s of a step, and the others for 2 s.
NUMBERS = "3 s of each step of 4 s, the others 2 s"


def test_no_rank_of_a_quiet_run_is_named() -> None:
    """Of a thousand runs in ``benchmarks/stragglers.py``."""
    assert list(named_in_quiet(range(100))) == []


def test_a_slow_rank_is_named_with_what_it_takes_its_time_for() -> None:
    """Of 95 % at least in ``benchmarks/stragglers.py``."""
    assert [seed for seed, _ in missed(range(40))] == []


def _even(ranks: int, slow: dict[int, tuple[float, float]], windows: int = 40, per_node: int = 2) -> list[RankTimes]:
    """Return ranks that wait 1 s for data, compute 2 s and then wait for the slowest; ``slow`` has other times."""
    found = []
    took = max(sum(each) for each in [(1.0, 2.0), *slow.values()])
    for rank in range(ranks):
        data, compute = slow.get(rank, (1.0, 2.0))
        spent = (data, compute, took - data - compute, 0.0, 0.0, 0.0)
        made = [Window(number * took, 10 + number, 1, 0, spent) for number in range(windows)]
        found.append(RankTimes(rank, rank // per_node, made))
    return found


def test_what_is_said_of_a_rank_and_of_all_ranks_of_a_node() -> None:
    (one,) = find(_even(4, {3: (1.0, 3.0)}))
    assert one == Straggler((3,), 1, None, "compute", 10, 40, 3.0, 2.0, 4.0, is_current=True)
    assert one.sentence == f"rank 3 computes 1.5 times slower for 40 steps: {NUMBERS}"
    (node,) = find(_even(6, {2: (3.0, 2.0), 3: (3.5, 2.0)}))
    assert (node.ranks, node.node, node.phase) == ((2, 3), 1, "data")
    numbers = "3.5 s of each step of 5.5 s, the others 1 s"
    assert node.sentence == f"both ranks of node 1 wait for data for 40 steps: {numbers}"


def test_that_a_rank_waits_for_a_cpu_is_said_before_the_numbers() -> None:
    ranks = _even(4, {3: (1.0, 3.0)})
    for queued, said in ((1.6, " it waits for a CPU 40 % of the time;"), (0.2, "")):
        ranks[3] = ranks[3]._replace(windows=[one._replace(queued=queued) for one in ranks[3].windows])
        (one,) = find(ranks)
        assert one.sentence == f"rank 3 computes 1.5 times slower for 40 steps:{said} {NUMBERS}"


def test_that_all_ranks_wait_for_a_cpu_is_not_said_of_one() -> None:
    ranks = [
        each._replace(windows=[one._replace(queued=1.6) for one in each.windows]) for each in _even(4, {3: (1.0, 3.0)})
    ]
    (one,) = find(ranks)
    assert one.sentence == f"rank 3 computes 1.5 times slower for 40 steps: {NUMBERS}"


def test_the_clock_of_a_slow_ranks_gpu_is_said_before_the_numbers() -> None:
    (one,) = find(_even(4, {3: (1.0, 3.0)}))
    one = replace(one, host="gpu03", clocks="1.1 GHz (thermal), the others at 1.75 GHz")
    clocks = "its GPU runs at 1.1 GHz (thermal), the others at 1.75 GHz"
    assert one.sentence == f"rank 3 on gpu03 computes 1.5 times slower for 40 steps: {clocks}; {NUMBERS}"


def test_late_data_is_named_where_the_wait_for_others_is_not_seen() -> None:
    (one,) = find(_even(3, {0: (0.0, 3.0), 1: (1.0, 2.0), 2: (0.1, 2.9)}))
    assert (one.ranks, one.phase, one.seconds, one.step) == ((1,), "data", 1.0, 3.0)


def test_too_few_steps_or_ranks_name_nobody() -> None:
    assert find([]) == []
    assert find(_even(1, {0: (1.0, 9.0)})) == []
    assert find(_even(2, {1: (1.0, 9.0)}, windows=15)) == []
    apart = _even(2, {1: (1.0, 9.0)})
    late = [apart[0], apart[1]._replace(windows=[one._replace(first=one.first + 900) for one in apart[1].windows])]
    assert find(late) == [], "they have no steps in common"


def test_only_steps_since_the_last_start_are_compared() -> None:
    before, after = _even(2, {1: (1.0, 9.0)}), _even(2, {})
    both = [
        one._replace(windows=[*one.windows, *(window._replace(restart=1) for window in other.windows)])
        for one, other in zip(before, after, strict=True)
    ]
    assert find(of_start(both)) == []
    assert [one.ranks for one in find(of_start(both, 0))] == [(1,)]


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=20))
def test_median_of_the_others(values: list[float]) -> None:
    expected = [statistics.median(values[:at] + values[at + 1 :]) for at in range(len(values))]
    assert medians_of_others(values) == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 9))
def test_no_time_is_lost_between_the_parts(counts: list[int], parts: int) -> None:
    windows, step = [], 0
    for count in counts:
        windows.append(Window(float(step), step, count, 0, (0.5 * count,) * len(PHASES)))
        step += count
    edges = sorted({step * part // parts for part in range(parts + 1)})
    for phases in per_step(windows, edges):
        assert all(math.isclose(seconds, 0.5) for seconds in phases)


def test_a_second_training_that_counts_its_steps_from_0_again() -> None:
    trainings = [
        [Window(100 * number + 3 * step, step, 1, 0, (1.0, 2.0, 0.0, 0.0, 0.0, 0.0)) for step in range(29)]
        for number in range(3)
    ]
    ranks = [RankTimes(rank, 0, [window for one in trainings for window in one]) for rank in range(2)]
    assert [each.windows for each in of_start(ranks)] == [trainings[-1]] * 2
    assert find(of_start(ranks)) == []


def _samples(folder: Path, queued: Sequence[float], **more: Any) -> None:
    for node, share in enumerate(queued):
        (folder / f"node-{node:03d}").mkdir(exist_ok=True)
        sample = {"host": f"gpu{node}", "time": 100.0, "cpus": 1.0, "memory": 1, "gpus": [], "net_out": 1e6, **more}
        (folder / f"node-{node:03d}" / "usage.json").write_text(json.dumps(sample | {"net_queued": share}))


def _exchanging(seconds: float) -> list[RankTimes]:
    """Return two ranks on each of three nodes that compute 1 s of a step, and exchange gradients."""
    spent = (0.0, 1.0, seconds, 0.0, 0.0, 0.0)
    made = [Window(2.0 * at, 10 + at, 1, 0, spent) for at in range(40)]
    return [RankTimes(rank, rank // 2, made) for rank in range(6)]


def test_a_slow_link_is_named_by_the_packets_that_wait_there(tmp_path: Path) -> None:
    _samples(tmp_path, (0.2, 0.9, 0.1))
    ((link,), _) = explained([], _exchanging(1.0), tmp_path)
    assert (link.ranks, link.node, link.phase, link.first, link.steps) == ((2, 3), 1, "exchange", 28, 22)
    assert link.sentence == (
        "both ranks on gpu1 exchange gradients over a slow link: packets wait to be sent 90 % of the time, "
        "on the others 15 %; 1 s of each step of 2 s"
    )


def test_a_link_is_not_named_if_all_are_as_busy_or_the_exchange_is_short(tmp_path: Path) -> None:
    _samples(tmp_path, (0.9, 0.95, 0.85))
    assert explained([], _exchanging(1.0), tmp_path)[0] == []
    _samples(tmp_path, (0.2, 0.9, 0.1))
    assert explained([], _exchanging(0.1), tmp_path)[0] == []
    assert [one.phase for one in explained([], _exchanging(1.0), tmp_path)[0]] == ["exchange"]


def test_a_node_that_sends_more_than_the_others_has_no_slow_link(tmp_path: Path) -> None:
    _samples(tmp_path, (0.2, 0.9, 0.1))
    sample = tmp_path / "node-001" / "usage.json"
    sample.write_text(json.dumps(json.loads(sample.read_text()) | {"net_out": 3e6}))
    assert explained([], _exchanging(1.0), tmp_path)[0] == []


@pytest.mark.parametrize(
    ("cpus", "queued", "blocked", "said", "fix"),
    [
        (2.94, 0.0, 0, "3 workers at 98 %", "More workers for the loader would help."),
        (0.06, 0.0, 2, "3 workers at 2 %, 2 blocked by storage", "The workers wait themselves: "),
        (0.6, 2.1, 0, "3 workers at 20 %, waiting for a CPU 70 %", "More CPUs for the job would help, "),
    ],
)
def test_what_the_workers_of_a_rank_that_waits_for_data_do(
    tmp_path: Path, cpus: float, queued: float, blocked: int, said: str, fix: str
) -> None:
    workers = {"71": {"count": 3, "cpus": cpus, "queued": queued, "blocked": blocked}}
    _samples(tmp_path, (0.0, 0.0), workers=workers)
    started = {"time": 1.0, "host": "gpu1", "kind": "ranks-started"}
    ranks = [{"rank": rank, "local_rank": rank - 2, "pid": 69 + rank} for rank in (2, 3)]
    (tmp_path / "node-001" / "agent.jsonl").write_text(json.dumps(started | {"ranks": ranks}) + "\n")
    both = _even(4, {2: (3.0, 2.0)})
    ((one,), _) = explained(find(both), both, tmp_path)
    assert (
        one.sentence == f"rank 2 on gpu1 waits for data for 40 steps: {said}; 3 s of each step of 5 s, the others 1 s"
    )
    assert one.workers is not None
    assert one.workers.fix.startswith(fix)
