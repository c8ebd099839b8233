"""What a tracker is, and what it knows of the run."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from allranks import contract

Value = float | int
#: How a run's id ends: the date and the time, and a number if need be.
_STAMP = re.compile(r"-\d{4}-\d{4}(-\d+)?$")


class Tracker(Protocol):
    """What an object in ``allranks.init(trackers=[...])`` implements, to write metrics to another place.

    allranks calls it from one background thread on rank 0. An exception ends the tracker, not the training. Two more
    methods are called if they exist: ``config(values)`` with hyperparameters, and ``resume(step)`` when the training
    continues after that step.
    """

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Write the values of a step."""

    def close(self) -> None:
        """Write pending values, and close."""


@dataclass(frozen=True)
class RunInfo:
    """The run that is tracked, and where its files go.

    Attributes:
        name: of the job, for projects and experiments.
        id: of the run; None for a script that was started by other means.
        folder: of the run; None likewise: then files go where the script was started.
    """

    name: str
    id: str | None = None
    folder: Path | None = None

    @classmethod
    def here(cls) -> RunInfo:
        """Read the environment of this process."""
        run, folder = os.environ.get(contract.RUN_ID), os.environ.get(contract.RUN_DIR)
        name = _STAMP.sub("", run) if run else Path(sys.argv[0]).stem or "python"
        return cls(name, run, Path(folder) if folder else None)
