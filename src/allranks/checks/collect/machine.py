"""What a machine gives to a process: CPUs, memory, disk space, limits, variables; and what is left of earlier runs."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.checks.collect.gather import ProbeRequest
from allranks.system import cgroups, processes
from allranks.system.processes import command_of, text_of

_LIMITS = {"memlock": "RLIMIT_MEMLOCK", "nofile": "RLIMIT_NOFILE", "nproc": "RLIMIT_NPROC"}
_VERBS, _INFINIBAND = Path("/dev/infiniband"), Path("/sys/class/infiniband")
#: The bit of the capability to lock any amount of memory, and the ids of a machine that has all users.
_IPC_LOCK, _ALL_USERS = 14, ["0", "0", "4294967295"]

#: Variables that say how ranks talk and compute.
_PREFIXES = (
    *("NCCL_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "GLOO_", "CUDA_", "OMP_", "MKL_", "KMP_", "UCX_", "FI_"),
    *("OMPI_", "MASTER_"),
)
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")

#: A process with one of these belongs to a run: the directory of one of ours, or the id of one of torchrun's.
_MARKS = (contract.RUN_DIR, "TORCHELASTIC_RUN_ID")
#: A heartbeat comes every 5 seconds.
_SILENCE = 60.0


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


def infiniband(request: ProbeRequest) -> list[dict[str, Any]]:
    """Return the ports of all devices for remote direct memory access, InfiniBand or RoCE."""
    return [
        {
            "device": folder.parts[-3],
            "port": int(folder.name),
            "state": text_of(folder / "state").partition(": ")[2],
            "rate": text_of(folder / "rate"),
            "layer": text_of(folder / "link_layer"),
        }
        for folder in sorted(_INFINIBAND.glob("*/ports/*"))
    ]


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
    values = {name: matter[name] for name in sorted(matter) if not contract.is_secret(name)}
    return {"values": values, "set": [name for name in request.variables if name in os.environ]}


# --- processes of the user's earlier runs that nothing watches any more ---


def leftovers(request: ProbeRequest) -> list[dict[str, Any]]:
    """Return the processes of runs that have lost what started them: their parent is gone, and no agent is there.

    Each has ``pid``, ``run``, ``command``, and ``memory`` in bytes.
    """
    ours = set(processes.lineage())
    others = [pid for pid in processes.process_ids() if pid not in ours]
    of_runs = {pid: run for pid in others if (run := processes.variable_of(pid, *_MARKS))}
    lost = {pid: run for pid, run in of_runs.items() if _has_lost(pid, of_runs)}
    alive = set()
    for run in {*lost.values()}:
        pids = {pid for pid in of_runs if of_runs[pid] == run}
        # A detached agent is itself left to init. Its heartbeat may be late: a slow file server, another clock.
        if not pids <= lost.keys() or not pids.isdisjoint(_agents(run)) or _is_watched(run, pids):
            alive.add(run)
    found = []
    for pid, run in lost.items():
        if run not in alive:
            fields = processes.stat_fields(pid)
            memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if fields else 0
            found.append({"pid": pid, "run": run, "command": " ".join(command_of(pid)[:4]), "memory": memory})
    return found


def _agents(run: str) -> Iterator[int]:
    """Yield the process ids of a run's agents, as they have recorded them."""
    for file in Path(run).glob(f"{contract.ATTEMPTS_DIR}/*/node-*/{contract.AGENT_EVENTS}"):
        for line in text_of(file).splitlines():
            with suppress(ValueError, KeyError, TypeError):  # A line that was cut off.
                event = json.loads(line)
                if event["kind"] == contract.AGENT_STARTED:
                    yield int(event["pid"])


def _is_watched(run: str, pids: Iterable[int]) -> bool:
    """Return True if an agent watches a run here: by its heartbeat or, before the first one, by its command."""
    beats = [file.stat().st_mtime for file in Path(run).glob(f"{contract.ATTEMPTS_DIR}/*/node-*/{contract.HEARTBEAT}")]
    if beats:
        return time.time() - max(beats) < _SILENCE
    return any(f"{run}/{contract.CODE}" in command_of(pid) for pid in pids)


def _has_lost(pid: int, of_runs: dict[int, str]) -> bool:
    """Return True if the first of a process's ancestors that belongs to the run was left to an init."""
    if _job_of(pid) not in ("", _job_of("self")):
        return False  # A scheduler's job that still runs: Slurm ends what a job leaves.
    parent = processes.parent_of(pid)
    while parent in of_runs:
        pid, parent = parent, processes.parent_of(parent)
    if parent is None:
        return False
    # In a container the first process may be torchrun, or any other launcher, and these run in Python. A user's systemd
    # takes in what it has started, terminals among it.
    program, *words = command_of(parent)
    name = Path(program).name
    if parent != 1:
        return name == "systemd" and "--user" in words
    return not name.startswith("python") and processes.variable_of(parent, *_MARKS) is None


def _job_of(pid: int | str) -> str:
    """Return the Slurm job in whose control group a process is; empty for none."""
    found = re.search(r"/job_\d+", text_of(Path(f"/proc/{pid}/cgroup")))
    return found[0] if found else ""
