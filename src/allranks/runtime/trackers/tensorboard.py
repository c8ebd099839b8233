"""TensorBoard, by torch's own writer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from allranks.runtime.trackers.base import Place, Tracker, Value, need


class TensorBoard:
    """Writes event files into a folder.

    Args:
        folder: for ``tensorboard --logdir``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._purge: int | None = None
        self._writer: Any = None

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Write a point of each curve, so that it can be seen at once."""
        for name, value in values.items():
            self._open().add_scalar(name, value, step)
        self._writer.flush()

    def config(self, values: dict[str, object]) -> None:
        """Show hyper-parameters as a text."""
        text = json.dumps(values, indent=2, default=str)
        self._open().add_text("config", f"```json\n{text}\n```")

    def resume(self, step: int) -> None:
        """Let TensorBoard hide the points after ``step`` that an earlier start has written."""
        self.close()
        self._purge = step + 1

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge)
        return self._writer


def open_tensorboard(place: Place) -> Tracker:
    """Write into ``tensorboard/`` of the run; without a run, into a folder of its own there.

    Raises:
        RankError: tensorboard is not installed.
    """
    need("tensorboard", "tensorboard")
    if place.folder is not None:
        return TensorBoard(place.folder / "tensorboard")
    return TensorBoard(Path("tensorboard", f"{place.name}-{time.strftime('%m%d-%H%M%S')}"))
