"""What a run's agents noted of the use of their nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allranks import contract


@dataclass(frozen=True)
class GpuUsage:
    """One GPU: the percentage of time that it was busy, and its memory in bytes, used and in all."""

    busy: int
    memory: int
    total: int


@dataclass(frozen=True)
class NodeUsage:
    """One node: when it was looked at, how many CPUs the run kept busy, and the bytes of memory that it held."""

    node: int
    host: str
    time: float
    cpus: float
    memory: int
    gpus: tuple[GpuUsage, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return asdict(self)


def read_usage(attempt: Path) -> Iterator[NodeUsage]:
    """Yield what is known of each node of an attempt, by number; a file that cannot be read tells nothing."""
    for path in sorted(attempt.glob(f"node-*/{contract.USAGE}")):
        try:
            raw = json.loads(path.read_text())
            gpus = tuple(GpuUsage(**gpu) for gpu in raw.pop("gpus"))
            yield NodeUsage(node=int(path.parent.name.removeprefix("node-")), gpus=gpus, **raw)
        except (OSError, ValueError, TypeError, KeyError):
            continue  # Being written, or of another version.
