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

#: Suffix of the speeds that allranks records: steps_per_second, samples_per_second.
SPEED = "_per_second"
#: Bytes of a growing file to read at once.
_BLOCK = 1 << 24


class MetricLine(NamedTuple):
    """One line of ``metrics.jsonl``: the values of a step, and when they were written, in seconds since 1970."""

    step: int
    time: float
    values: Mapping[str, float]


def read_metrics(folder: Path, *, finite: bool = True) -> list[MetricLine]:
    """Return the lines of a run's metrics in the order of steps; empty if its script logs none.

    Incomplete lines are left out, and so are values that are not finite; with ``finite=False`` these are NaN.

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
    """Parse a line, with values that were not finite as NaN; None if it is incomplete or not a record."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError):
        found = json.loads(text)
        step, when = int(found.pop("step")), float(found.pop("time"))
        if {*map(type, found.values())} != {float}:  # In most lines they are all that.
            numbers = {name: math.nan if value is None else value for name, value in found.items()}
            found = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        return MetricLine(step, when, found)
    return None


class MetricsReader:
    """Reads the metrics of a run incrementally; values that are not finite are NaN."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / contract.METRICS_FILE
        self._end = 0
        self._last = b""  # The last line read: if it is gone, the file was replaced.

    def read(self) -> tuple[list[MetricLine], bool]:
        """Return new complete lines, at most some MB, and whether they start from the first line.

        A training that resumes drops lines: then all are read again. An unreadable file counts as empty.
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
    """Return the median of each speed, which is robust to steps around a checkpoint or an evaluation."""
    found: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.values.items():
            if name.endswith(SPEED):
                found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def values_until(
    lines: list[MetricLine], *, step: float = float("inf"), time: float = float("inf")
) -> dict[str, float]:
    """Return the last value of each metric, except speeds, up to a step and a time."""
    found: dict[str, float] = {}
    for line in lines:
        if line.step <= step and line.time <= time:
            found |= {name: value for name, value in line.values.items() if not name.endswith(SPEED)}
    return found
