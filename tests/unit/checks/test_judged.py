"""What ranks have told of a trial, judged."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from allranks.checks.selftest import judged, where
from allranks.record.selftest import (
    Bandwidth,
    Collective,
    Done,
    Link,
    OperationStarted,
    SelfTestReport,
    TrainingResult,
    read,
)
from allranks.runs.status import State
from recorded_trial import trial_of, who

HOSTS = ["gpu1", "gpu2", "gpu3", "gpu4"]
ALL = [who(rank, 4, host) for rank, host in enumerate(HOSTS)]
LOSSES = (1.0, 0.5, 0.25)


def wrong(*told: SelfTestReport) -> list[tuple[str, str]]:
    """Return the parts that are wrong, and what is."""
    return [(part.name, part.wrong) for part in judged(trial_of([*ALL, *told], size=4)) if part.wrong]


def trained(rank: int, **other: object) -> TrainingResult:
    return replace(TrainingResult(rank, "auto", LOSSES, LOSSES, "aa", 100.0), **other)  # type: ignore[arg-type]


def test_nothing_was_told() -> None:
    assert judged(trial_of([], size=4, state=State.FAILED)) == []
    (part,) = judged(trial_of([], size=4))
    assert part.wrong == "no rank reported anything: does this machine see what they write?"


def test_a_link_to_a_rank_that_has_told_nothing_of_itself() -> None:
    *_, part = judged(trial_of([ALL[0], Link(0, 1, 1, 1.0)], size=4, state=State.FAILED))
    assert (part.name, part.figures["hosts"]) == ("rank 0 on gpu1 to rank 1", ["gpu1", "rank 1"])


def test_ranks_that_found_each_other() -> None:
    (part,) = judged(trial_of(ALL, size=4))
    assert (part.wrong, part.figures) == ("", {"ranks": 4, "hosts": 4})


def test_ranks_that_believe_to_be_alone() -> None:
    alone = [replace(who(0, 1, host), node_rank=0) for host in HOSTS]
    (part,) = judged(trial_of(alone, size=4))
    assert part.wrong == "there must be 4 ranks, and they see 1"


def test_a_rank_that_is_missing() -> None:
    (part,) = judged(trial_of(ALL[:3], size=4))
    assert part.wrong == "ranks 0 to 3 must report once each, and these did: 0, 1, 2"
    (part,) = judged(trial_of(ALL[:3], size=4, state=State.FAILED))
    assert part.wrong == ""


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([2], "on rank 2 on gpu3: no"),
        ([1, 3], "on rank 1 on gpu2 and 1 other: no"),
        ([0, 1, 2, 3], "on all ranks; on rank 0 on gpu1: no"),
    ],
)
def test_the_ranks_of_a_wrong_collective(bad: list[int], words: str) -> None:
    told = [Collective(rank, "gather", "no" if rank in bad else "", 0.1) for rank in range(4)]
    assert wrong(*told) == [("gather", words)]


def test_the_slowest_rank_counts() -> None:
    told = [Bandwidth(rank, 1 << 20, 0.25 if rank == 2 else 0.125) for rank in range(4)]
    *_, part = judged(trial_of([*ALL, *told], size=4))
    assert part.name == "all_reduce of 1 MiB"
    assert part.figures == {"bytes": 1 << 20, "seconds": 0.25, "algbw": 1 << 22, "busbw": 1.5 * (1 << 22)}


def test_a_link() -> None:
    *_, part = judged(trial_of([*ALL, Link(1, 2, 1000, 0.5)], size=4))
    assert part.name == "rank 1 on gpu2 to rank 2 on gpu3"
    assert part.figures == {"ranks": [1, 2], "hosts": ["gpu2", "gpu3"], "bytes": 1000, "bandwidth": 2000.0}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, ""),
        ({"losses": (1.0, 0.5 + 4e-10, 0.25)}, ""),
        ({"losses": (1.0, 0.5000001, 0.25)}, "the loss of step 1 must be 0.5, as in one process, and is 0.5000001"),
        ({"losses": (1.0, 1.0), "alone": (1.0, 1.0)}, "the loss must fall, and goes from 1 to 1"),
        ({"losses": (float("nan"),) * 2, "alone": (float("nan"),) * 2}, "the loss of step 0 must be nan, as in one"),
        ({"weights": "bb"}, "the weights are not those of the other ranks"),
    ],
)
def test_a_training(other: dict[str, object], words: str) -> None:
    found = wrong(*(trained(rank, **(other if rank == 1 else {})) for rank in range(4)))
    start = f"on rank 1 on gpu2: {words}"
    assert [(name, text[: len(start)]) for name, text in found] == ([("training (auto)", start)] if words else [])


def test_where_ranks_ended() -> None:
    begun = [OperationStarted(rank, "all_gather") for rank in range(3)]
    further = [OperationStarted(0, "barrier"), OperationStarted(1, "barrier")]
    trial = trial_of([*ALL[:3], *begun, *further], size=4, state=State.FAILED)
    assert where(trial) == "rank 2 on gpu3 in all_gather; rank 3 not there yet; 2 ranks in barrier"
    assert where(trial_of([*ALL, *map(Done, range(4))], size=4)) == ""


def test_lines_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    node = tmp_path / "node-000"
    node.mkdir()
    lines = [
        "of the user's own sitecustomize",
        f"allranks-trial RankInfo {json.dumps(asdict(replace(ALL[0], host='before the restart')))}",
        f"allranks-trial RankInfo {json.dumps(asdict(ALL[0]))}",
        f"noise first: allranks-trial TrainingResult {json.dumps(asdict(trained(0)))}",
        'allranks-trial Other {"rank": 0}',
    ]
    (node / "rank-0.out").write_text("\n".join(lines) + '\nallranks-trial Done {"rank": 0}')
    assert read(tmp_path) == [ALL[0], trained(0)]
