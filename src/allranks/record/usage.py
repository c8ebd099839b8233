"""Resource usage of a node over an attempt: one file per node, with means over several samples each.

It is an 8-byte magic number, then records of equal length in order of time. When there are too many, pairs are joined,
and later records cover twice the time: so the size of the file is bounded.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

#: Busy CPUs, bytes of memory, GPU use from 0 to 1, bytes of GPU memory, bytes per second. NaN: unknown.
MEASURES: Final = ("cpus", "memory", "gpu", "gpu_memory", "net_in", "net_out", "disk_read", "disk_write")
MOST: Final = 512
_HEAD: Final = b"usage 1\n"
_RECORD = struct.Struct(f"<d{len(MEASURES)}f")

#: Time in seconds since 1970, and the :data:`MEASURES`.
Row = tuple[float, ...]


class History:
    """Writes the file of a node, of which it must be the only writer."""

    def __init__(self, path: Path, mode: int) -> None:
        self._path, self._mode, self._each = path, mode, 1
        self._rows = read_history(path)  # From an earlier agent.
        self._open: list[Row] = []

    def add(self, sample: Mapping[str, Any]) -> None:
        """Add a sample of :class:`allranks.agent.heartbeat.Usage`.

        Raises:
            OSError: the file cannot be written.
        """
        self._open.append((sample["time"], *(_value(sample, name) for name in MEASURES)))
        if len(self._open) < self._each:
            return
        self._rows.append(_joined(self._open))
        self._open = []
        if len(self._rows) >= MOST:
            self._rows = [_joined(self._rows[at : at + 2]) for at in range(0, len(self._rows), 2)]
            self._each *= 2
        if len(self._rows) in (1, MOST // 2):
            self._write(os.O_TRUNC, _HEAD + b"".join(_RECORD.pack(*row) for row in self._rows))
        else:
            self._write(os.O_APPEND, _RECORD.pack(*self._rows[-1]))

    def _write(self, how: int, data: bytes) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, self._mode)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


def read_history(path: Path) -> list[Row]:
    """Return the records of a file, oldest first; empty if it is missing, or of another version.

    Records out of order, as in a truncated file, are left out.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return []
    data = data.removeprefix(_HEAD) if data.startswith(_HEAD) else b""
    rows, last = list[Row](), -math.inf
    for row in _RECORD.iter_unpack(data[: len(data) - len(data) % _RECORD.size]):
        if last < row[0] < math.inf:
            rows.append(row)
            last = row[0]
    return rows


def _value(sample: Mapping[str, Any], name: str) -> float:
    gpus: Sequence[Mapping[str, float]] = sample["gpus"]
    if gpus and name == "gpu":
        return sum(gpu["busy"] for gpu in gpus) / len(gpus) / 100
    if gpus and name == "gpu_memory":
        return sum(gpu["memory"] for gpu in gpus)
    return float(sample.get(name, math.nan))


def _joined(rows: Sequence[Row]) -> Row:
    """Return the means of the known values."""
    known = ([value for value in column if not math.isnan(value)] for column in zip(*rows, strict=True))
    return tuple(sum(values) / len(values) if values else math.nan for values in known)
