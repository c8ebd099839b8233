"""Whether the port where the nodes meet is free on the first of them, and who holds it if it is not."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks import processes
from allranks.probe.once import once
from allranks.probe.order import Order
from allranks.probe.reading import command_of, text_of
from allranks.routes import listen_for

#: Of a command line; it is to be recognized.
_MOST_SHOWN = 120


@dataclass(frozen=True)
class Opened:
    """The socket that listens at the port, or why there is none."""

    listener: socket.socket | None
    error: str | None


@once
def opened(order: Order) -> Opened:
    """Listen at the port of an order."""
    try:
        return Opened(listen_for(order.master_addr, order.master_port), None)
    except OSError as error:
        return Opened(None, os.strerror(error.errno) if error.errno else str(error))


def port(order: Order) -> dict[str, Any] | None:
    """Return the port, why it cannot be listened at and who holds it; None where it is not this node's to listen at."""
    if order.nnodes == 1 or not order.master_port or order.node:
        return None
    error = opened(order).error
    return {"port": order.master_port, "error": error, "holder": _holder(order.master_port) if error else None}


def _holder(port: int) -> dict[str, Any] | None:
    """Return user, process and command of who has a port; process and command only where the kernel tells us."""
    found = next(_sockets(port), None)
    if not found:
        return None
    user, inode = found
    pid = next((pid for pid in processes.process_ids() if _has(pid, inode)), None)
    return {"user": user, "pid": pid, "command": (pid and " ".join(command_of(pid))[:_MOST_SHOWN]) or None}


def _sockets(port: int) -> Iterator[tuple[int, str]]:
    """Yield user and inode of each socket with that port here (man 5 proc); those without inode are nobody's."""
    for name in ("tcp", "tcp6"):
        for line in text_of(Path("/proc/net", name)).splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[9] != "0":
                yield int(fields[7]), fields[9]


def _has(pid: int, inode: str) -> bool:
    try:
        return any(str(file.readlink()) == f"socket:[{inode}]" for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False  # It has ended, or is somebody else's.
