"""The plug-in for Lightning, without a training; tests/recipes continues one to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import allranks
from allranks.errors import RankError


@pytest.fixture(scope="module")
def plugin() -> Any:
    pytest.importorskip("lightning")
    from allranks import lightning

    return lightning


def test_devices_that_are_not_the_ranks_are_named(plugin: Any) -> None:
    environment = plugin.AllranksEnvironment(SimpleNamespace(world_size=8, local_world_size=4))
    environment.validate_settings(4, 2)
    with pytest.raises(RankError) as caught:
        environment.validate_settings(1, 1)
    error = caught.value
    assert (error.what, error.why) == (
        "the Trainer is for 1 ranks and not for 8",
        "it has devices=1 and num_nodes=1",
    )
    assert (error.fix or "").startswith("Trainer(devices=4, num_nodes=2), or ")


def test_what_is_logged_is_in_the_record(plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with allranks.init(device="cpu", seed=None) as ctx:
        logger = plugin.AllranksLogger(ctx)
        logger.log_metrics({"loss": 0.5, "epoch": 0}, 10)
        logger.log_metrics({"val_loss": 0.25}, 10)
        logger.log_metrics({"loss": 0.125, "epoch": 0}, 20)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.pop("time") > 0 for line in lines] == [True] * 3
    assert lines.pop().pop("steps_per_second") > 0
    assert lines == [{"step": 10, "loss": 0.5, "epoch": 0}, {"step": 10, "val_loss": 0.25}]


@pytest.mark.parametrize("given", [{"every": "often"}, {"keep": 0}])
def test_invalid_arguments(plugin: Any, given: dict[str, Any]) -> None:
    with pytest.raises(RankError, match=next(iter(given))):
        plugin.ResumeCallback(SimpleNamespace(run_dir=Path()), **given)
