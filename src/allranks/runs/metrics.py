"""The metrics that a run has recorded with ``ctx.metrics.log``."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from allranks import contract
from allranks.record.files import read_failure

#: How the names of speeds end, which allranks records itself: steps_per_second, samples_per_second.
SPEED = "_per_second"
#: How much of a file that grows is read at once.
_BLOCK = 1 << 24


class MetricLine(NamedTuple):
    """One line of ``metrics.jsonl``: the values of a step, and when they were written, in seconds since 1970."""

    step: int
    time: float
    values: Mapping[str, float]


def read_metrics(folder: Path, *, finite: bool = True) -> list[MetricLine]:
    """Return the lines of a run's metrics as they were written, step by step; none if its script logs nothing.

    Lines that are cut off are left out, and so are values that are not finite; with ``finite=False`` these are NaN.

    Raises:
        RunFolderError: the file cannot be read.
    """
    path, lines = folder / contract.METRICS_FILE, list[MetricLine]()
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                if line := _line(text):
                    if finite and not all(map(math.isfinite, line.values.values())):
                        values = {name: each for name, each in line.values.items() if math.isfinite(each)}
                        line = line._replace(values=values)
                    lines.append(line)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise read_failure(path, error) from error
    return lines


def _line(text: str | bytes) -> MetricLine | None:
    """Return a line as it was written, values that were not finite as NaN; None if it is cut off or no record."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError):
        found = json.loads(text)
        step, when = int(found.pop("step")), float(found.pop("time"))
        if {*map(type, found.values())} != {float}:  # In most lines they are all that.
            numbers = {name: math.nan if value is None else value for name, value in found.items()}
            found = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        return MetricLine(step, when, found)
    return None


class MetricsReader:
    """Reads the metrics of a run bit by bit while they are written; values that are not finite are NaN."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / contract.METRICS_FILE
        self._end = 0
        self._last = b""  # The last line that was read: when it is no longer there, the file is another one.

    def read(self) -> tuple[list[MetricLine], bool]:
        """Return complete lines since the last call, some MB at once, and whether they are from the first on.

        A training that resumes drops lines: then all are read again. A file that cannot be read has no lines.
        """
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size == self._end:
                    return [], False
                file.seek(self._end - len(self._last))
                restarts = size < self._end or file.read(len(self._last)) != self._last
                if restarts:
                    self._end = file.seek(0)
                data = file.read(_BLOCK)
        except OSError:
            return [], False
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        self._end += sum(map(len, lines))
        if lines:
            self._last = lines[-1]
        elif restarts:
            self._last = b""
        return [line for text in lines if (line := _line(text))], restarts


def speeds(lines: list[MetricLine]) -> dict[str, float]:
    """Return the median of each speed, which the steps around a checkpoint or an evaluation do not change."""
    found: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.values.items():
            if name.endswith(SPEED):
                found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def values_until(
    lines: list[MetricLine], *, step: float = float("inf"), time: float = float("inf")
) -> dict[str, float]:
    """Return the last value of each metric up to a step and a time, without speeds."""
    found: dict[str, float] = {}
    for line in lines:
        if line.step <= step and line.time <= time:
            found |= {name: value for name, value in line.values.items() if not name.endswith(SPEED)}
    return found
