"""How far a training is, in a few words, and its checkpoints; without what draws a screen."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from allranks import contract
from allranks.job.units import format_number, format_seconds
from allranks.record.events import read_saves
from allranks.runs.metrics import SPEED
from allranks.runs.steptime import Position

#: Checkpoints that are kept in mind.
_MOST_SAVES = 200


class Changes:
    """Whether a file has changed since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    def are_there(self) -> bool:
        """Look at the file; a file that is not there has not changed at first."""
        before, self._seen = self._seen, None
        with suppress(OSError):
            stat = self._path.stat()
            self._seen = stat.st_mtime_ns, stat.st_size
        return self._seen != before


class Saves:
    """The newest checkpoints of a run, the oldest first: step, and when it was written, if that is recorded."""

    def __init__(self, folder: Path) -> None:
        self.all: list[tuple[int, float | None]] = []
        self._folder = folder
        self._changes = Changes(folder / contract.CHECKPOINTS_FILE)

    @property
    def newest(self) -> tuple[int, float | None] | None:
        """The step of the newest checkpoint, and when it was written, if that is known."""
        return self.all[-1] if self.all else None

    def read(self) -> bool:
        """Read what is new; return whether there was any."""
        if not self._changes.are_there():
            return False
        saves = [save for save in read_saves(self._folder) if save.path][-_MOST_SAVES:]
        self.all = [(save.step, save.time) for save in saves]
        return True


def speed(name: str, value: float) -> str:
    """Write a speed: ``31.4 steps/s``."""
    return f"{format_number(value)} {name.removesuffix(SPEED)}/s"


def progress(
    step: int | None,
    last: Mapping[str, float],
    saved: tuple[int, float | None] | None,
    now: float,
    position: Position | None = None,
) -> list[str]:
    """Return step, epoch, time left and speeds, by the last values of metrics, and the newest checkpoint."""
    if position is not None and step is None:
        step = position.step
    parts = [f"step {step}"] if step is not None else []
    if position is not None:
        parts.append(str(position))
    elif "epoch" in last:
        parts.append(f"epoch {last['epoch']:g}")
    parts += [speed(name, value) for name, value in last.items() if name.endswith(SPEED)]
    if saved:
        age = f", {format_seconds(max(0.0, now - saved[1]))} ago" if saved[1] else ""
        parts.append(f"checkpoint at step {saved[0]}{age}")
    return parts
