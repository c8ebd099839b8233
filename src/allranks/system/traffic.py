"""Network traffic of this machine, and disk traffic of processes."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

#: From <linux/rtnetlink.h> and <linux/pkt_sched.h>: the request for all queues, and the place of their length.
_GET_QUEUES, _DUMP, _DONE, _STATISTICS, _LENGTH = 38, 0x301, 3, 3, 28
_HEAD, _QUEUE_BYTES = struct.Struct("=IHHII"), 20
#: InfiniBand ports count in words of four bytes (Linux, Documentation/ABI/stable/sysfs-class-infiniband).
_INFINIBAND_WORD = 4


def network_bytes(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> dict[str, float]:
    """Return the bytes received and sent since boot, including InfiniBand.

    Only physical interfaces count, so that a bridge is not counted twice. A container may have none; then all but the
    loopback count. IP over InfiniBand is included in the counters of its ports.
    """
    counts = dict[str, tuple[int, int]]()
    with suppress(OSError):
        for line in (proc / "net" / "dev").read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            fields = numbers.split()
            counts[name.strip()] = int(fields[0]), int(fields[8])
    counts = {name: each for name, each in counts.items() if name != "lo" and not name.startswith("ib")}
    cards = [each for name, each in counts.items() if (sys / "class" / "net" / name / "device").exists()]
    pairs = [*(cards or counts.values())]
    for port in sys.glob("class/infiniband/*/ports/*/counters"):
        received, sent = _number(port / "port_rcv_data"), _number(port / "port_xmit_data")
        pairs.append((_INFINIBAND_WORD * received, _INFINIBAND_WORD * sent))
    return {"net_in": sum(each[0] for each in pairs), "net_out": sum(each[1] for each in pairs)}


def packets_wait() -> bool:
    """Return whether packets wait in the send queue of a network interface; False if unknown.

    A saturated link, such as one with a lower speed than the others, has a queue most of the time. InfiniBand traffic
    that bypasses the kernel has no queue here.
    """
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK) as kernel:
            kernel.send(_HEAD.pack(_HEAD.size + _QUEUE_BYTES, _GET_QUEUES, _DUMP, 1, 0) + bytes(_QUEUE_BYTES))
            while not any(_queue_lengths(kernel.recv(1 << 17))):
                pass
            return True
    except (OSError, AttributeError, struct.error):  # Everything is read; or not Linux, or a sandbox.
        return False


def _queue_lengths(answer: bytes) -> Iterator[int]:
    """Yield the length of each queue in an answer, which consists of messages with attributes."""
    at = 0
    while at < len(answer):
        size, kind, *_ = _HEAD.unpack_from(answer, at)
        if kind <= _DONE:
            return
        place, end = at + _HEAD.size + _QUEUE_BYTES, at + size
        while place < end:
            length, name = struct.unpack_from("=HH", answer, place)
            if name == _STATISTICS:
                yield struct.unpack_from("=I", answer, place + 4 + _LENGTH)[0]
            place += length + 3 & ~3
        at += size + 3 & ~3


def disk_bytes(pid: int, proc: str = "/proc") -> tuple[int, int]:
    """Return the bytes that a process has read from and written to storage (man 5 proc); 0 if unknown."""
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
    """Computes rates of counters."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}
        self._then = 0.0

    def of(self, counters: Mapping[str, float], now: float | None = None) -> dict[str, float]:
        """Return the growth per second since the last call; empty at the first, and 0 for a counter that shrinks."""
        now = time.monotonic() if now is None else now
        before, seconds = self._before, now - self._then
        self._before, self._then = counters, now
        if not before or seconds <= 0:
            return {}
        grown = {name: max(0.0, count - before.get(name, count)) for name, count in counters.items()}
        return {name: round(count / seconds, 3) for name, count in grown.items()}
