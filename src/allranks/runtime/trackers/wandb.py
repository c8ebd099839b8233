"""Weights & Biases, also offline: its own variables, such as WANDB_MODE and WANDB_PROJECT, count."""

from __future__ import annotations

import os
import re
from typing import Any

from allranks.runtime.trackers.base import Place, Tracker, Value, cannot_start, need


class WeightsAndBiases:
    """Writes to a run of Weights & Biases.

    Args:
        run: what ``wandb.init`` gave.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        # Its own counter of steps only goes up, and a training that goes on from a checkpoint steps back.
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Write a point of each curve."""
        self._run.log({"step": step, **values})

    def config(self, values: dict[str, object]) -> None:
        """Set hyper-parameters."""
        self._run.config.update(values, allow_val_change=True)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def open_wandb(place: Place) -> Tracker:
    """Start a run, or go on with that of an earlier attempt. The project is named as the job.

    Raises:
        RankError: wandb is not installed, or it cannot start, for example for want of a login.
    """
    need("wandb", "wandb")
    import wandb

    options: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", place.name)}
    if place.folder is not None:
        options["dir"] = os.environ.get("WANDB_DIR", str(place.folder))
    if place.run is not None and "WANDB_RUN_ID" not in os.environ:
        options.update(id=re.sub(r"[^\w-]", "-", place.run), name=place.run, resume="allow")
    try:
        return WeightsAndBiases(wandb.init(**options))
    except Exception as error:
        raise cannot_start("wandb", error, "wandb login, or without network: WANDB_MODE=offline") from error
