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
    with pytest.raises(RankError, match="3 ranks are on this node, of 5"):
        plugin.AllranksEnvironment(SimpleNamespace(world_size=5, local_world_size=3)).validate_settings(3, 2)


@pytest.mark.parametrize(
    ("every", "by_epoch", "last", "followed"),
    [(4, 1, False, [3, 7]), (float("inf"), 1, False, []), (4, None, False, [1, 5]), (None, 1, True, [*range(8)])],
)
def test_no_stop_where_a_validation_or_the_end_of_the_epoch_follows(
    plugin: Any, every: float | None, by_epoch: int | None, last: bool, followed: list[int]
) -> None:
    """A resume from there would leave them out. Batches are counted in the epoch, or over all: two came before."""

    def trainer(number: int) -> Any:
        loop = SimpleNamespace(total_batch_idx=number + 2)
        return SimpleNamespace(
            val_check_batch=every, check_val_every_n_epoch=by_epoch, is_last_batch=last, fit_loop=loop
        )

    assert [number for number in range(8) if plugin._is_followed(trainer(number), number)] == followed


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
