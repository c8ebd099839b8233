"""What a machine gives to a process: CPUs, memory, room, and the kernel's limits."""

from __future__ import annotations

import os
import resource
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from allranks.probe.order import Order
from allranks.probe.reading import text_of

_LIMITS = {"memlock": "RLIMIT_MEMLOCK", "nofile": "RLIMIT_NOFILE", "nproc": "RLIMIT_NPROC"}
_CGROUP = Path("/sys/fs/cgroup")
#: Where cgroup v1 has what v2 has in the second place.
_MEMORY_LIMITS = ("memory/memory.limit_in_bytes", "memory.max")


def host(order: Order) -> dict[str, Any]:
    """Return who this is: host name, user, Python."""
    return {
        "name": socket.gethostname(),
        "user": os.getuid(),
        "python": "{}.{}.{}".format(*sys.version_info),
        "executable": sys.executable,
        "prefix": sys.prefix,
    }


def cpus(order: Order) -> dict[str, int]:
    """Return how many CPUs there are, and how many this process may use."""
    return {"all": os.cpu_count() or 1, "allowed": len(os.sched_getaffinity(0))}


def memory(order: Order) -> dict[str, int | None]:
    """Return bytes of memory: all, what is free to be used, and what a container allows."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limits = [int(text) for name in _MEMORY_LIMITS if (text := text_of(_CGROUP / name)).isdecimal()]
    limit = min((limit for limit in limits if limit < total), default=None)
    return {"total": total, "available": available, "limit": limit}


def shm(order: Order) -> dict[str, int] | None:
    """Return bytes of ``/dev/shm``, all and free; None where there is none."""
    return _room("/dev/shm") if Path("/dev/shm").is_dir() else None


def limits(order: Order) -> dict[str, list[int | None]]:
    """Return the kernel's limits for a process of the user, soft and hard; None: unlimited. memlock is in bytes."""
    return {
        name: [_limit(value) for value in resource.getrlimit(getattr(resource, of))] for name, of in _LIMITS.items()
    }


def disks(order: Order) -> dict[str, dict[str, Any]]:
    """Return, for each folder of the order and the one for temporary files, its room and whether it can be written."""
    folders = {**order.folders, "temporary": tempfile.gettempdir()}
    return {name: {"path": folder, **_disk(Path(folder))} for name, folder in folders.items()}


def _disk(folder: Path) -> dict[str, Any]:
    """Look at the nearest folder above that is there: the job makes the others."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    return {"there": str(there), **_room(str(there)), "error": _why_unwritable(there)}


def _why_unwritable(folder: Path) -> str | None:
    """Say why no file can be written in a folder; one block of it must find room."""
    try:
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(bytes(4096))
            stream.flush()
    except OSError as error:
        return error.strerror
    return None


def _room(folder: str) -> dict[str, int]:
    found = os.statvfs(folder)
    return {"all": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize, "files": found.f_favail}


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value
