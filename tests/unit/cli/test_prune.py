"""``allranks prune``: which runs go, and what of them stays."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

DAY = 86400


@pytest.fixture
def runs(allranks: Any) -> Path:
    """Give the directory of three runs that ended 40, 20 and 0 days ago; the first has a checkpoint of its own."""
    allranks.script("print('here')")
    for _ in range(3):
        assert allranks("run", "train.py").rc == 0
    for run, days in zip(allranks.runs(), (40, 20, 0), strict=True):
        record = json.loads((run / "record.json").read_text())
        record["status"]["ended"] = time.time() - days * DAY
        (run / "record.json").write_text(json.dumps(record))
    first = allranks.runs()[0]
    checkpoint = first / "checkpoints" / "step-000000007"
    checkpoint.mkdir(parents=True)
    note = {"attempt": 0, "step": 7, "path": str(checkpoint), "leaving": False}
    (first / "checkpoints.jsonl").write_text(json.dumps(note) + "\n")
    return first.parent


def test_runs_that_ended_longer_ago_are_removed_and_their_checkpoints_stay(allranks: Any, runs: Path) -> None:
    first, second, third = allranks.runs()
    for age, count in {"1y": "0 runs", "6w": "0 runs", "5w": "1 run", "900h": "1 run"}.items():
        told = allranks("prune", "--older-than", age, "--dry-run").stderr
        assert told.endswith(f"{count} would be removed\n"), age
    would = allranks("prune", "--older-than", "10d", "--dry-run")
    stays = f"; stays: runs/{first.name}/checkpoints"
    lines = [f"{first.name}, 40 d ago{stays}", f"{second.name}, 20 d ago"]
    assert would.stderr.splitlines() == [*(f"would remove {line}" for line in lines), "2 runs would be removed"]
    assert len(allranks.runs()) == 3
    done = allranks("prune", "--older-than", "10d")
    assert (done.rc, done.stderr.splitlines()) == (0, [*(f"removed {line}" for line in lines), "2 runs removed"])
    assert allranks.runs() == [first, third]
    assert [path.name for path in first.iterdir()] == ["checkpoints"]
    assert [run["id"] for run in json.loads(allranks("ps", "--json").stdout)] == [third.name]


def test_the_newest_are_kept_and_all_of_the_others_goes_where_asked(allranks: Any, runs: Path) -> None:
    third = allranks.runs()[2]
    assert allranks("prune", "--keep", "1", "--checkpoints").stderr.endswith("2 runs removed\n")
    assert allranks.runs() == [third]
    assert allranks("prune", "--keep", "0").rc == 0
    assert [*runs.iterdir()] == []  # Nor a link ``latest`` to nowhere.


def test_both_must_allow_it(allranks: Any, runs: Path) -> None:
    assert allranks("prune", "--keep", "2", "--older-than", "30d").stderr.endswith("1 run removed\n")
    assert allranks("prune", "--keep", "1", "--older-than", "30d").stderr == "0 runs removed\n"
    assert allranks("prune", "--keep", "4").stderr == "0 runs removed\n"


def test_a_run_that_goes_on_stays(allranks: Any) -> None:
    allranks.script("import time\nprint('ready', flush=True)\ntime.sleep(300)\n")
    process = allranks.popen("run", "train.py")
    assert process.stdout.readline() == b"[0] ready\n"
    assert allranks("prune", "--keep", "0").stderr == "0 runs removed\n"
    assert (allranks.run() / "record.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a run to another user")
def test_runs_of_others_and_checkpoints_that_are_gone_do_not_count(allranks: Any, runs: Path) -> None:
    first, second, third = allranks.runs()
    shutil.rmtree(first / "checkpoints")
    os.chown(second, 65534, -1)
    assert allranks("prune", "--keep", "1").stderr.endswith(" d ago\n1 run removed\n")
    assert allranks.runs() == [second, third]
