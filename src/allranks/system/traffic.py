"""What goes over the network cards of this machine, and what processes read from disks and write to them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

#: Its ports count in words of four bytes (Linux, Documentation/ABI/stable/sysfs-class-infiniband).
_INFINIBAND_WORD = 4


def network_bytes(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> dict[str, float]:
    """Return the bytes that came in and went out since the machine was started, InfiniBand included.

    Of its interfaces cards count, so that a bridge does not count a second time; in a container there may be none, and
    then all count but loopback. IP over InfiniBand is part of what its ports count.
    """
    counts = dict[str, tuple[int, int]]()
    with suppress(OSError):
        for line in (proc / "net" / "dev").read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            fields = numbers.split()
            counts[name.strip()] = int(fields[0]), int(fields[8])
    counts = {name: each for name, each in counts.items() if name != "lo" and not name.startswith("ib")}
    cards = [each for name, each in counts.items() if (sys / "class" / "net" / name / "device").exists()]
    ports = [
        tuple(_INFINIBAND_WORD * _number(port / "counters" / f"port_{way}_data") for way in ("rcv", "xmit"))
        for port in sys.glob("class/infiniband/*/ports/*")
    ]
    pairs = [*(cards or counts.values()), *ports]
    return {"net_in": sum(each[0] for each in pairs), "net_out": sum(each[1] for each in pairs)}


def disk_bytes(pid: int, proc: str = "/proc") -> tuple[int, int]:
    """Return the bytes that a process has read from storage and written to it (man 5 proc); 0 if that is not known."""
    with suppress(OSError, ValueError, KeyError):
        with open(f"{proc}/{pid}/io") as file:
            found = dict(line.split(": ") for line in file)
        return int(found["read_bytes"]), int(found["write_bytes"])
    return 0, 0


def _number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


class Rates:
    """How fast counters grow."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}
        self._then = 0.0

    def of(self, counters: Mapping[str, float], now: float | None = None) -> dict[str, float]:
        """Return the growth a second since the last call; nothing at the first, and 0 of a counter that shrinks."""
        now = time.monotonic() if now is None else now
        before, seconds = self._before, now - self._then
        self._before, self._then = counters, now
        if not before or seconds <= 0:
            return {}
        grown = {name: max(0.0, count - before.get(name, count)) for name, count in counters.items()}
        return {name: round(count / seconds, 3) for name, count in grown.items()}
