"""What the node of rank 0 uses, for TensorBoard, Weights & Biases and MLflow: by the samples of its agent."""

from __future__ import annotations

import json
import os
from pathlib import Path

from allranks import contract

_OF_NODE = (("cpu", "cpus"), ("memory", "memory"))


class SystemMetrics:
    """Reads the newest sample; without an agent there is none."""

    def __init__(self) -> None:
        steps = os.environ.get(contract.STEP_FILE)
        self._path = Path(steps).with_name(contract.USAGE) if steps else None
        self._time = 0.0

    def read(self) -> dict[str, float]:
        """Return percentages by name; none if there is no newer sample than at the last call."""
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
