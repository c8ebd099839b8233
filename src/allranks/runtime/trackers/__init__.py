"""Writes metrics on rank 0: always to a file of JSON lines, and to the trackers that the user chose."""

from __future__ import annotations

import atexit
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.errors import RankError
from allranks.runtime import log
from allranks.runtime.trackers.base import JsonLines, RunInfo, Tracker, Value
from allranks.runtime.trackers.packages import open_mlflow, open_tensorboard, open_wandb

__all__ = ["JsonLines", "RunInfo", "Tracker", "TrackerGroup", "Value", "open_trackers"]

#: Limit for a tracker to write pending values at the end, in seconds.
CLOSE_SECONDS = 60.0
#: Usage of a node: name in a metric, and in a sample.
_OF_NODE = (("cpu", "cpus"), ("memory", "memory"))
_NAMED: dict[str, Callable[[RunInfo], Tracker]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "mlflow": open_mlflow,
}


class SystemMetrics:
    """Resource usage of rank 0's node, from the newest sample of its agent; empty without an agent."""

    def __init__(self) -> None:
        steps = os.environ.get(contract.STEP_FILE)
        self._path = Path(steps).with_name(contract.USAGE) if steps else None
        self._time = 0.0

    def read(self) -> dict[str, float]:
        """Return percentages by name; empty if there is no sample newer than at the last call."""
        try:
            sample = json.loads(self._path.read_bytes()) if self._path else {}
            if sample.get("time", 0.0) <= self._time:
                return {}
            self._time = sample["time"]
            found = {f"system/{name}": _percent(sample[key], sample[f"{key}_total"]) for name, key in _OF_NODE}
            for number, gpu in enumerate(sample["gpus"]):
                found[f"system/gpu{number}"] = float(gpu["busy"])
                found[f"system/gpu{number}_memory"] = _percent(gpu["memory"], gpu["total"])
            return found
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}  # The agent has not written one yet.


def _percent(used: float, total: float) -> float:
    return round(100 * used / total, 1) if total else 0.0


class Background:
    """Calls a tracker in order from its own thread, so that a slow network or an error does not stop the training.

    A tracker that raises is reported once and not called again. :meth:`close` waits at most ``seconds``. The thread
    also reads the system metrics, so that a file server that does not answer does not block the training.
    """

    def __init__(self, tracker: Tracker, seconds: float = CLOSE_SECONDS, system: SystemMetrics | None = None) -> None:
        self._tracker = tracker
        self._system = system
        self._name = type(tracker).__name__
        self._seconds = seconds
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._failed = False
        self._closed = False
        self._thread: threading.Thread | None = None
        # Also after an error in the script, which closes nothing: the values before a failure matter most.
        atexit.register(self.close)

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Queue the values of a step, with the system metrics if they are new."""
        if not self._closed:
            self._hand_over(partial(self._write, step, values))

    def _write(self, step: int, values: dict[str, Value]) -> None:
        self._tracker.write(step, values | self._system.read() if self._system else values)

    def call(self, method: str, *values: object) -> None:
        """Queue a call of a method, if the tracker has it."""
        if not self._closed and (function := getattr(self._tracker, method, None)):
            self._hand_over(partial(function, *values))

    def close(self) -> None:
        """Wait, with a limit, until everything is written. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._hand_over(self._tracker.close)
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(self._seconds)
            if self._thread.is_alive():
                log(f"warning: tracker {self._name} did not end within {self._seconds:g} s; it may lack what is left")

    def _hand_over(self, call: Callable[[], Any]) -> None:
        if self._failed:
            return
        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"allranks-{self._name}", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._failed:
                continue
            try:
                call()
            except Exception as error:  # noqa: BLE001 - reported, and the training continues
                self._failed = True
                text = str(error).strip().split("\n")[0]
                log(
                    f"warning: tracker {self._name} failed and gets no more metrics, the training continues: "
                    f"{type(error).__name__}: {text}"
                )


class TrackerGroup:
    """All trackers of a job: writes the file directly, and the others from threads, so that no network blocks steps."""

    def __init__(self, file: JsonLines, others: Iterable[Background]) -> None:
        self._file = file
        self._others = [*others]

    def write(self, step: int, values: dict[str, Value], when: float) -> None:
        """Write one record: values at a step, and the time in seconds since 1970."""
        self._file.write(step, values, when)
        for tracker in self._others:
            tracker.write(step, dict(values))

    def config(self, values: dict[str, object]) -> None:
        """Pass hyperparameters to the trackers that take them."""
        for tracker in self._others:
            tracker.call("config", values)

    def resume(self, step: int) -> None:
        """Continue after ``step``: drop later records."""
        self._file.resume(step)
        for tracker in self._others:
            tracker.call("resume", step)

    def flush(self) -> None:
        """Write pending records to the file."""
        self._file.flush()

    def close(self) -> None:
        """Write pending values, with a time limit for each tracker."""
        self._file.close()
        for tracker in self._others:
            tracker.close()


def open_trackers(chosen: Iterable[str | Tracker], run: RunInfo | None = None) -> TrackerGroup:
    """Open the file and the trackers that the user chose by name or passed as objects."""
    run = run or RunInfo.here()
    others = [
        Background(_open(each, run), system=SystemMetrics() if isinstance(each, str) else None) for each in chosen
    ]
    path = (run.folder or Path()) / contract.METRICS_FILE
    return TrackerGroup(JsonLines(path, announce=run.folder is None), others)


def _open(tracker: str | Tracker, run: RunInfo) -> Tracker:
    if not isinstance(tracker, str):
        if not (callable(getattr(tracker, "write", None)) and callable(getattr(tracker, "close", None))):
            raise RankError(
                f"a {type(tracker).__name__} is not a tracker",
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
    return _NAMED[tracker](run)
