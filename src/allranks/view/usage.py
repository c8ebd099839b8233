"""What the nodes of a run used over time, as curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.record.usage import MEASURES, Row, read_history

#: Points of a curve; and nodes that have a curve each, of more there are mean, lowest and highest.
_MOST_POINTS, _FEW_NODES = 240, 4
#: The curves in their order: title, and by how much values are multiplied.
_CURVES = {
    "gpu": ("GPU use, %", 100.0),
    "gpu_memory": ("GPU memory, GB", 1e-9),
    "cpus": ("CPUs busy", 1.0),
    "memory": ("memory, GB", 1e-9),
    "net_in": ("network in, MB/s", 1e-6),
    "net_out": ("network out, MB/s", 1e-6),
    "disk_read": ("disk read, MB/s", 1e-6),
    "disk_write": ("disk written, MB/s", 1e-6),
}
_OF_NODES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "lowest": min,
    "highest": max,
}


def usage_over_time(attempt: Path) -> list[dict[str, Any]]:
    """Return the curves of an attempt's nodes, by seconds since the first sample; none if there are no samples."""
    paths = sorted(attempt.glob(f"node-*/{contract.USAGE_HISTORY}"))
    nodes = {path.parent.name.removeprefix("node-").lstrip("0") or "0": read_history(path) for path in paths}
    nodes = {name: rows for name, rows in nodes.items() if len(rows) > 1}
    if not nodes:
        return []
    start, end = min(rows[0][0] for rows in nodes.values()), max(rows[-1][0] for rows in nodes.values())
    count = min(_MOST_POINTS, max(map(len, nodes.values())))
    width = max(end - start, 1e-9) / count
    curves = []
    for measure, (title, factor) in _CURVES.items():
        column = MEASURES.index(measure) + 1
        found = {name: _points(rows, column, start, width, count) for name, rows in nodes.items()}
        found = {name: points for name, points in found.items() if points}
        if not found:
            continue
        series = {f"node {name}": points for name, points in found.items()}
        if len(found) > _FEW_NODES:
            series = {name: _together([*found.values()], of) for name, of in _OF_NODES.items()}
        curves.append(
            {
                "name": title,
                "series": [
                    {
                        "name": name,
                        "run": at,
                        "seconds": [round((point + 0.5) * width, 1) for point in sorted(points)],
                        "values": [float(f"{points[point] * factor:.4g}") for point in sorted(points)],
                    }
                    for at, (name, points) in enumerate(series.items())
                ],
            }
        )
    return curves


def _points(rows: Sequence[Row], column: int, start: float, width: float, count: int) -> dict[int, float]:
    """Return the mean of what is known in each of so many spans of time, by their number."""
    spans = dict[int, list[float]]()
    for row in rows:
        if math.isfinite(row[column]):
            spans.setdefault(min(count - 1, int((row[0] - start) / width)), []).append(row[column])
    return {span: statistics.fmean(values) for span, values in spans.items()}


def _together(nodes: Sequence[Mapping[int, float]], of: Callable[[Sequence[float]], float]) -> dict[int, float]:
    """Return one value for all nodes in each span of time."""
    spans = {span for points in nodes for span in points}
    return {span: of([points[span] for points in nodes if span in points]) for span in spans}
