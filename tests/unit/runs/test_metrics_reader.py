"""Metrics are read bit by bit while they are written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from allranks.runs.metrics import MetricsReader


def _write(path: Path, *steps: int, mode: str = "a") -> None:
    with (path / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps({"step": step, "time": 1.0, "loss": step / 10}) + "\n" for step in steps)


@pytest.fixture
def reader(tmp_path: Path) -> MetricsReader:
    return MetricsReader(tmp_path)


def _read(reader: MetricsReader) -> tuple[list[int], bool]:
    lines, restarts = reader.read()
    return [line.step for line in lines], restarts


def test_each_line_is_read_once(reader, tmp_path: Path):
    assert _read(reader) == ([], False)
    _write(tmp_path, 1, 2)
    assert _read(reader) == ([1, 2], False)
    assert _read(reader) == ([], False)
    _write(tmp_path, 3)
    assert _read(reader) == ([3], False)


def test_a_line_that_is_being_written_is_read_when_it_is_complete(reader, tmp_path: Path):
    _write(tmp_path, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "time"')
        file.flush()
        assert _read(reader) == ([1], False)
        assert _read(reader) == ([], False)
        file.write(': 1.0}\n{"step": "none"}\n')
    assert _read(reader) == ([2], False)


@pytest.mark.parametrize("steps", [(1,), (1, 9, 10, 11)], ids=["shorter", "longer"])
def test_lines_that_a_resumed_training_has_dropped_are_read_again(reader, tmp_path: Path, steps: tuple[int, ...]):
    _write(tmp_path, 1, 2, 3)
    assert _read(reader) == ([1, 2, 3], False)
    _write(tmp_path, *steps, mode="w")
    assert _read(reader) == ([*steps], True)
    _write(tmp_path, 12)
    assert _read(reader) == ([12], False)


def test_a_value_that_is_not_finite_is_nan(reader, tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "loss": null, "name": "x"}\n')
    (line,), _ = reader.read()
    assert [*line.values] == ["loss"]
    assert math.isnan(line.values["loss"])
