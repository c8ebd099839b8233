"""What a machine gives to a process: CPUs, memory, room, and the kernel's limits."""

from __future__ import annotations

import os
import resource
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from allranks.probe import cgroups
from allranks.probe.order import Order
from allranks.probe.reading import text_of

_LIMITS = {"memlock": "RLIMIT_MEMLOCK", "nofile": "RLIMIT_NOFILE", "nproc": "RLIMIT_NPROC"}
_VERBS = Path("/dev/infiniband")
#: The bit of the capability to lock any amount of memory, and the ids of a machine that has all users.
_IPC_LOCK, _ALL_USERS = 14, ["0", "0", "4294967295"]


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
    return {"all": os.cpu_count() or 1, "allowed": cgroups.usable_cpus()}


def memory(order: Order) -> dict[str, int | None]:
    """Return bytes of memory: all, what is free to be used, and what its control groups allow."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = cgroups.memory()
    # cgroup v1 has a number larger than any memory where there is no limit.
    return {"total": total, "available": available, "limit": limit if limit and limit < total else None}


def shm(order: Order) -> dict[str, int] | None:
    """Return bytes of ``/dev/shm``, all and free; None where there is none."""
    return _room("/dev/shm") if Path("/dev/shm").is_dir() else None


def limits(order: Order) -> dict[str, Any]:
    """Return the kernel's limits for a process of the user, soft and hard; None: unlimited. memlock is in bytes.

    Further ``locks_any``: whether memlock does not bind this process; ``verbs``: whether there is a device for remote
    direct memory access that it may open; ``tasks``: how many processes and threads its control groups allow; and
    ``kernel``: how many the whole machine can have.
    """
    limits = {
        name: [_limit(value) for value in resource.getrlimit(getattr(resource, of))] for name, of in _LIMITS.items()
    }
    verbs = any(os.access(device, os.R_OK | os.W_OK) for device in _VERBS.glob("uverbs*"))
    return {**limits, "locks_any": _locks_any(), "verbs": verbs, "tasks": cgroups.tasks(), "kernel": _most_threads()}


def _most_threads() -> int | None:
    texts = [text_of(Path("/proc/sys/kernel", name)) for name in ("threads-max", "pid_max")]
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def interfaces(order: Order) -> list[str]:
    """Return the names of the network interfaces."""
    return [name for _, name in socket.if_nameindex()]


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


def _locks_any() -> bool:
    """Tell whether this process may lock any amount of memory: root may, but in a container with users of its own."""
    status = dict(line.split(":", 1) for line in text_of(Path("/proc/self/status")).splitlines())
    has_all_users = text_of(Path("/proc/self/uid_map")).split() == _ALL_USERS
    return has_all_users and bool(int(status["CapEff"], 16) >> _IPC_LOCK & 1)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value
