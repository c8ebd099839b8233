"""The metrics that a run has recorded with ``ctx.metrics.log``."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allranks import contract
from allranks.errors import RunFolderError

#: How the names of speeds end, which allranks records itself: steps_per_second, samples_per_second.
_SPEED = "_per_second"


@dataclass(frozen=True)
class MetricLine:
    """One line of ``metrics.jsonl``: the values of a step, and when they were written, in seconds since 1970."""

    step: int
    time: float
    values: Mapping[str, float]


def read_metrics(folder: Path) -> list[MetricLine]:
    """Return the lines of a run's metrics as they were written, step by step; none if its script logs nothing.

    Lines that are cut off and values that are not finite are left out.

    Raises:
        RunFolderError: the file cannot be read.
    """
    path, lines = folder / contract.METRICS_FILE, list[MetricLine]()
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    found = json.loads(text)
                    step, when = int(found.pop("step")), float(found.pop("time"))
                    numbers = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
                    values = {name: value for name, value in numbers.items() if math.isfinite(value)}
                    lines.append(MetricLine(step, when, values))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"cannot read {path}", why=error.strerror) from error
    return lines


def speeds(lines: list[MetricLine]) -> dict[str, float]:
    """Return the median of each speed, which the steps around a checkpoint or an evaluation do not change."""
    found: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.values.items():
            if name.endswith(_SPEED):
                found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def values_until(
    lines: list[MetricLine], *, step: float = float("inf"), time: float = float("inf")
) -> dict[str, float]:
    """Return the last value of each metric up to a step and a time, without speeds."""
    found: dict[str, float] = {}
    for line in lines:
        if line.step <= step and line.time <= time:
            found |= {name: value for name, value in line.values.items() if not name.endswith(_SPEED)}
    return found
