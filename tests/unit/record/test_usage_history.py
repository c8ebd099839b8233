"""What a node used over time: a file that stays small, however long the attempt is."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest

from allranks.record.usage import MEASURES, MOST, History, read_history
from allranks.view.report import usage_over_time


def _sample(time: float, **values: Any) -> dict[str, Any]:
    return {"time": time, "cpus": time, "memory": 2.0, "gpus": [], **values}


def _written(folder: Path, node: int, count: int, **values: Any) -> Path:
    path = folder / f"node-{node:03d}" / "usage.bin"
    path.parent.mkdir(parents=True)
    history = History(path, 0o600)
    for time in range(count):
        history.add(_sample(float(time), **values))
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    gpus = [{"busy": 100, "memory": 3}, {"busy": 50, "memory": 4}]
    path = _written(tmp_path, 0, 2, gpus=gpus, net_in=5.0)
    first, second = read_history(path)
    known = dict(zip(("time", *MEASURES), second, strict=True))
    assert (known["time"], known["cpus"], known["memory"], known["gpu"], known["gpu_memory"]) == (1, 1, 2, 0.75, 7)
    assert (known["net_in"], math.isnan(known["disk_read"])) == (5, True)
    assert first[0] == 0


def test_of_a_long_attempt_records_are_joined(tmp_path: Path) -> None:
    path = _written(tmp_path, 0, 4 * MOST)
    rows = read_history(path)
    assert MOST // 2 <= len(rows) < MOST
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert rows[0][:2] == (3.5, 3.5), "the mean of eight samples"
    assert rows[-1][0] == 4 * MOST - 4.5


def test_an_agent_that_is_started_again_continues_the_file(tmp_path: Path) -> None:
    path = _written(tmp_path, 0, 2)
    History(path, 0o600).add(_sample(9.0))
    assert [row[0] for row in read_history(path)] == [0, 1, 9]


@pytest.mark.parametrize("content", [b"", b"usage 0\n" + bytes(40), b"usage 1\n" + bytes(39)])
def test_a_file_of_another_version_or_cut_off_has_no_records(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "usage.bin").write_bytes(content)
    assert read_history(tmp_path / "usage.bin") == []
    assert read_history(tmp_path / "missing") == []


def test_records_out_of_order_are_left_out_and_what_is_not_finite_is_not_shown(tmp_path: Path) -> None:
    path = _written(tmp_path, 0, 3, net_in=math.inf)
    _, first, second, third = path.read_bytes()[:8], *(path.read_bytes()[8 + 40 * at : 48 + 40 * at] for at in range(3))
    path.write_bytes(b"usage 1\n" + second + first + struct.pack("<d", math.inf) + bytes(32) + bytes(40) + third)
    assert [row[0] for row in read_history(path)] == [1, 2]
    assert [curve["name"] for curve in usage_over_time(tmp_path)] == ["CPUs busy", "memory, GB"]


def test_each_of_few_nodes_has_a_curve_and_what_is_not_known_has_none(tmp_path: Path) -> None:
    for node in range(2):
        _written(tmp_path, node, 5, net_out=2e6 * node)
    cpus, memory, sent = usage_over_time(tmp_path)
    assert [one["name"] for one in (cpus, memory, sent)] == ["CPUs busy", "memory, GB", "network out, MB/s"]
    assert [(one["name"], one["values"]) for one in sent["series"]] == [("node 0", [0] * 5), ("node 1", [2] * 5)]
    assert cpus["series"][0]["seconds"] == [0.4, 1.2, 2.0, 2.8, 3.6]
    assert cpus["series"][0]["values"] == [0, 1, 2, 3, 4]


def test_of_many_nodes_there_are_mean_lowest_and_highest(tmp_path: Path) -> None:
    for node in range(6):
        _written(tmp_path, node, 5, gpus=[{"busy": 10 * node, "memory": 0}])
    use = usage_over_time(tmp_path)[0]
    assert [(one["name"], one["values"][0]) for one in use["series"]] == [("mean", 25), ("lowest", 0), ("highest", 50)]
    assert usage_over_time(tmp_path / "missing") == []
