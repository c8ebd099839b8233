"""Where metrics go to: a file of JSON lines always, and what the user chooses beside it. On rank 0 alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from allranks import contract
from allranks.errors import RankError
from allranks.runtime.trackers.background import Background
from allranks.runtime.trackers.base import Place, Tracker, Value
from allranks.runtime.trackers.jsonl import JsonLines
from allranks.runtime.trackers.mlflow import open_mlflow
from allranks.runtime.trackers.tensorboard import open_tensorboard
from allranks.runtime.trackers.wandb import open_wandb

__all__ = ["JsonLines", "Place", "Tracker", "TrackerGroup", "Value", "open_trackers"]

_NAMED: dict[str, Callable[[Place], Tracker]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "mlflow": open_mlflow,
}


class TrackerGroup:
    """All trackers of a job: the file at once, the others from a thread, so that no network stops the steps.

    Args:
        file: the JSON lines.
        others: what the user chose.
    """

    def __init__(self, file: JsonLines, others: Iterable[Tracker]) -> None:
        self._file = file
        self._others = [Background(tracker) for tracker in others]

    def write(self, step: int, values: dict[str, Value], when: float) -> None:
        """Write one record: values at a step, and the time in seconds since 1970."""
        self._file.write_at(step, values, when)
        for tracker in self._others:
            tracker.write(step, dict(values))

    def config(self, values: dict[str, object]) -> None:
        """Hand hyper-parameters to those trackers that take some."""
        for tracker in self._others:
            tracker.config(values)

    def resume(self, step: int) -> None:
        """Go on after ``step``: forget what was written beyond it."""
        self._file.resume(step)
        for tracker in self._others:
            tracker.resume(step)

    def flush(self) -> None:
        """Put into the file what waits to be written."""
        self._file.flush()

    def close(self) -> None:
        """Write what is left, with a limit in time for each."""
        self._file.close()
        for tracker in self._others:
            tracker.close()


def open_trackers(chosen: Iterable[str | Tracker], place: Place | None = None) -> TrackerGroup:
    """Open the file, and the trackers that the user chose by name or made.

    Raises:
        RankError: there is no tracker of that name, its package is missing, or it cannot start.
    """
    place = place or Place.here()
    others = [_open(tracker, place) for tracker in chosen]
    path = (place.folder or Path()) / contract.METRICS_FILE
    return TrackerGroup(JsonLines(path, tell=place.folder is None), others)


def _open(tracker: str | Tracker, place: Place) -> Tracker:
    if not isinstance(tracker, str):
        if not (callable(getattr(tracker, "write", None)) and callable(getattr(tracker, "close", None))):
            raise RankError(
                f"a {type(tracker).__name__} is no tracker",
                why="a tracker has the methods write(step, values) and close()",
                fix=f"name one of {', '.join(_NAMED)}, or give an object with these methods",
            )
        return tracker
    if tracker not in _NAMED:
        raise RankError(
            f"there is no tracker {tracker!r}",
            why=f"there are {', '.join(_NAMED)}; metrics.jsonl is written always",
            fix="name one of these, or give an object with the methods write(step, values) and close()",
        )
    return _NAMED[tracker](place)
