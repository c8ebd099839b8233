"""How far a training is in its epochs, and how long it still takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allranks import contract
from allranks.clusters.registry import load_kind
from allranks.record.steptime import HEAD, PHASES, Place, Window
from allranks.runs.record import Record, Run, load
from allranks.runs.steptime import Position, position
from allranks.view.feed import RunsFeed
from waiting import PATIENCE, wait_for

#: Two epochs of 8 batches, and a third: each step waits until it may be made.
TRAINING = """\
import pathlib, time
import torch
import allranks
from allranks.runtime import steptime

steptime._WINDOW_SECONDS = 0.0  # A window for each step.
with allranks.init() as ctx:
    model = ctx.prepare(torch.nn.Linear(4, 1))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=1e-3)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=1, quiet=True)
    for epoch in loader.epochs(3):
        for (batch,) in loader:
            ctx.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            while ctx.progress.step == 14 and not pathlib.Path("end").exists():
                time.sleep(0.01)
"""


def written(run: Run, *windows: Window) -> Run:
    """Write windows of rank 0."""
    node = run.attempt_folder / "node-000"
    node.mkdir(parents=True, exist_ok=True)
    (node / f"rank-0{contract.TIMES_SUFFIX}").write_bytes(HEAD + b"".join(map(Window.to_bytes, windows)))
    return run


def window(start: float, first: int, place: Place, restart: int = 0) -> Window:
    """Return a window of 10 steps in 2 s."""
    return Window(start, first, 10, restart, (2.0, *([0.0] * (len(PHASES) - 1))), place)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run that has a directory."""
    words = dict.fromkeys(("id", "name", "cluster", "kind", "host"), "local")
    return Run(tmp_path, Record(**words, world_size=1, nnodes=1, stop_timeout=30.0, file_mode=0o600, created=0.0))


def test_the_time_left_is_of_all_epochs_at_the_mean_speed_of_this_start(run: Run) -> None:
    places = [Place(1, 8, 10, 100), Place(1, 8, 90, 100), Place(2, 8, 55, 100)]
    written(run, window(0.0, 0, places[0]), window(1000.0, 1, places[1], 1), window(1068.0, 136, places[2], 1))
    # 145 - 10 batches in 1070 + 30 - 1002 s, and 655 are left.
    found = position(run, 1100.0)
    assert found == Position(146, 2, 8, 45, pytest.approx(655 * 98 / 135))
    assert str(found) == "epoch 2 of 8, 45 %, 8 min left"


def test_nothing_is_guessed(run: Run) -> None:
    assert position(run, 100.0) is None
    assert position(written(run, window(0.0, 0, Place())), 100.0) is None, "a stream"
    written(run, window(0.0, 0, Place(1, 0, 90, 100)), window(2.0, 10, Place(1, 0, 75, 100)))
    assert str(position(run, 4.0)) == "epoch 1, 25 %", "the script has not said how many epochs"
    written(run, window(0.0, 0, Place(1, 3, 90, 100)))
    assert str(position(run, 4.0)) == "epoch 1 of 3, 10 %", "there is no speed yet"


def test_status_shows_where_a_training_is(allranks: Any) -> None:
    allranks.script(TRAINING)
    process = allranks.popen("run", "train.py")
    wait_for("the run", (allranks.folder / "runs" / "latest").exists)
    shown = wait_for("step 14", lambda: _at(14, json.loads(allranks("status", "--json").stdout)["position"]))
    left = shown.pop("seconds_left")
    assert shown == {"step": 14, "epoch": 2, "epochs": 3, "percent": 75}
    assert left > 0
    assert "epoch 2 of 3, 75 %, " in allranks("status").stdout
    several = RunsFeed(allranks.runs, load_kind)
    (row,) = several.read().rows
    assert row.position is not None
    assert str(row.position).startswith("epoch 2 of 3, 75 %, ")
    (allranks.folder / "end").touch()
    assert (process.communicate(timeout=PATIENCE), process.returncode)[1] == 0
    assert json.loads(allranks("status", "--json").stdout)["position"] is None, "it has ended"
    assert position(load(allranks.runs()[-1]), 0.0) is not None


def _at(step: int, found: dict[str, Any] | None) -> dict[str, Any] | None:
    return found if found and found["step"] == step else None
