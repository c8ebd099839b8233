"""What a run has recorded of its metrics."""

from __future__ import annotations

import json


def lines_of(folder):
    """Return the lines of metrics.jsonl, without times and speeds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line.pop("time") > 1.7e9
        line.pop("steps_per_second", None)
    return lines
