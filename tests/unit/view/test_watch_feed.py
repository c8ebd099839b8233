"""What allranks watch reads of a run."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.clusters.registry import load_kind
from allranks.runs.record import load
from allranks.runs.status import State
from allranks.view.feed import Curve, Feed, RunsFeed, Snapshot


@pytest.fixture
def run(failed_run: Path, tmp_path: Path) -> Path:
    """Give a copy of a failed run, to be changed."""
    return Path(shutil.copytree(failed_run, tmp_path / "runs" / failed_run.name))


def _read(run: Path) -> Snapshot:
    return Feed(load(run), load_kind("local")).read()


def test_a_run_that_has_failed(run: Path):
    (run / "metrics.jsonl").write_text('{"step": 7, "time": 1.0, "loss": 0.5}\n{"step": 8, "ti')
    shot = _read(run)
    assert shot.run.record.status.state is State.FAILED
    assert (shot.step, shot.metrics, shot.problem) == (7, {"loss": (0.5, [0.5])}, "")
    assert [text for _, text in shot.events] == [
        "attempt 1: 2 ranks started",
        f"attempt 1 ended: FAILED: {shot.run.record.status.reason}",
    ]
    assert shot.lines
    assert all(line.startswith("[") for line in shot.lines)


def test_the_log_of_one_rank(run: Path):
    feed = Feed(load(run), load_kind("local"))
    feed.show_rank(1)
    shot = feed.read()
    assert shot.rank == 1
    assert {line.partition("]")[0] for line in shot.lines or ()} <= {"[1"}
    feed.show_rank(None)
    assert feed.read().rank is None


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _remove_attempts(run: Path) -> None:
    shutil.rmtree(run / "attempts")


def _cut_all(run: Path) -> None:
    for path in run.rglob("*"):
        if path.is_file() and path.name not in ("record.json", "code"):
            _cut(path)


@pytest.mark.parametrize(
    "damage", [_remove_attempts, _cut_all], ids=["nothing but its record", "files cut in the middle"]
)
def test_what_is_left_of_a_run_is_shown(run: Path, damage: Callable[[Path], None]):
    damage(run)
    shot = _read(run)
    assert (shot.run.record.id, shot.problem) == (run.name, "")


def test_a_record_that_is_cut_is_a_problem_and_no_end(run: Path):
    feed = Feed(load(run), load_kind("local"))
    _cut(run / "record.json")
    shot = feed.read()
    assert shot.problem.startswith(f"{run / 'record.json'} is not a record of a run: ")


def test_several_runs_without_those_whose_record_is_corrupt(run: Path):
    other = run.with_name("other")
    shutil.copytree(run, other)
    _cut(other / "record.json")
    feed = RunsFeed(lambda: [run, other], load_kind)
    feed.show(0, 20)
    shown = feed.read()
    (row,) = shown.rows
    assert (shown.top, shown.total) == (0, 2)
    assert (row.run.folder, row.step, row.last) == (run, None, {})


def test_of_checkpoints_that_follow_each_other_the_last_is_an_event(run: Path):
    records = [
        {"attempt": 0, "step": step, "path": "/saved", "leaving": False, "time": 4e9 + step} for step in (3, 4, 5)
    ]
    (run / "checkpoints.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    shot = _read(run)
    assert shot.saved == (5, 4e9 + 5)
    assert [text for _, text in shot.events[-2:]] == [
        f"attempt 1 ended: FAILED: {shot.run.record.status.reason}",
        "checkpoint at step 5",
    ]


def test_a_curve_keeps_its_shape_in_few_points():
    curve = Curve()
    for step in range(10_000):
        curve.add(float(step))
    curve.add(math.nan)
    assert math.isnan(curve.last)
    assert 256 <= len(curve.points) <= 512
    assert curve.points == sorted(curve.points)
    assert (curve.points[0], round(curve.points[-1], -2)) == (15.5, 10_000)
