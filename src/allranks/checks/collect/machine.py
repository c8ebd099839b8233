"""What a machine gives to a process: CPUs, memory, disk space, the kernel's limits, and variables."""

from __future__ import annotations

import os
import resource
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from allranks.checks.collect.gather import ProbeRequest
from allranks.contract import is_secret
from allranks.system import cgroups
from allranks.system.processes import text_of

_LIMITS = {"memlock": "RLIMIT_MEMLOCK", "nofile": "RLIMIT_NOFILE", "nproc": "RLIMIT_NPROC"}
_VERBS = Path("/dev/infiniband")
#: The bit of the capability to lock any amount of memory, and the ids of a machine that has all users.
_IPC_LOCK, _ALL_USERS = 14, ["0", "0", "4294967295"]

#: Variables that say how ranks talk and compute.
_PREFIXES = (
    *("NCCL_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "GLOO_", "CUDA_", "OMP_", "MKL_", "KMP_", "UCX_", "FI_"),
    *("OMPI_", "MASTER_"),
)
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")


def host(request: ProbeRequest) -> dict[str, Any]:
    """Return host name, user and Python."""
    return {
        "name": socket.gethostname(),
        "user": os.getuid(),
        "python": "{}.{}.{}".format(*sys.version_info),
        "executable": sys.executable,
    }


def cpus(request: ProbeRequest) -> dict[str, int]:
    """Return how many CPUs there are, and how many this process may use."""
    return {"all": os.cpu_count() or 1, "allowed": cgroups.usable_cpus()}


def memory(request: ProbeRequest) -> dict[str, int | None]:
    """Return bytes of memory: total, available, and the limit of its control groups."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = cgroups.memory()
    # cgroup v1 has a number larger than any memory where there is no limit.
    return {"total": total, "available": available, "limit": limit if limit and limit < total else None}


def shm(request: ProbeRequest) -> dict[str, int] | None:
    """Return bytes of ``/dev/shm``, all and free; None where there is none."""
    return _room("/dev/shm") if Path("/dev/shm").is_dir() else None


def limits(request: ProbeRequest) -> dict[str, Any]:
    """Return the kernel's limits for a process of the user, soft and hard; None: unlimited. memlock is in bytes.

    Further ``locks_any``: whether memlock does not bind this process; ``verbs``: whether there is a device for remote
    direct memory access that it may open; ``tasks``: how many processes and threads its control groups allow; and
    ``kernel``: how many the whole machine can have.
    """
    pairs = {name: resource.getrlimit(getattr(resource, of)) for name, of in _LIMITS.items()}
    limits = {name: [None if n == resource.RLIM_INFINITY else n for n in pair] for name, pair in pairs.items()}
    verbs = any(os.access(device, os.R_OK | os.W_OK) for device in _VERBS.glob("uverbs*"))
    texts = [text_of(Path("/proc/sys/kernel", name)) for name in ("threads-max", "pid_max")]
    most = min((int(text) for text in texts if text.isdecimal()), default=None)
    # Root may lock any amount of memory, but not in a container with users of its own.
    status = dict(line.split(":", 1) for line in text_of(Path("/proc/self/status")).splitlines())
    has_all_users = text_of(Path("/proc/self/uid_map")).split() == _ALL_USERS
    locks_any = has_all_users and bool(int(status["CapEff"], 16) >> _IPC_LOCK & 1)
    return {**limits, "locks_any": locks_any, "verbs": verbs, "tasks": cgroups.tasks(), "kernel": most}


def interfaces(request: ProbeRequest) -> list[str]:
    """Return the names of the network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def disks(request: ProbeRequest) -> dict[str, dict[str, Any]]:
    """Return space and writability of each directory of the request, and of the one for temporary files."""
    found: dict[str, dict[str, Any]] = {}
    for name, folder in {**request.folders, "temporary": tempfile.gettempdir()}.items():
        # The nearest directory above that is there: the job makes the others.
        there = next(path for path in (Path(folder), *Path(folder).parents) if path.is_dir())
        error = None
        try:
            with tempfile.TemporaryFile(dir=there) as stream:
                stream.write(bytes(4096))  # One block must find room.
                stream.flush()
        except OSError as why:
            error = why.strerror
        found[name] = {"path": folder, "there": str(there), **_room(str(there)), "error": error}
    return found


def _room(folder: str) -> dict[str, int]:
    found = os.statvfs(folder)
    return {"all": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize, "files": found.f_favail}


def variables(request: ProbeRequest) -> dict[str, Any]:
    """Return ``values`` of the variables that matter, by name, no secrets; and which of the request's are ``set``."""
    matter = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES) or name in _NAMES}
    values = {name: matter[name] for name in sorted(matter) if not is_secret(name)}
    return {"values": values, "set": [name for name in request.variables if name in os.environ]}
