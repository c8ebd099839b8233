"""Limits of this process by its control groups, which a container, systemd or a scheduler has set.

Limits of parent groups apply too, and each controller may have a separate hierarchy (cgroup v1).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from allranks.system.processes import text_of

_PROC = Path("/proc/self")


def usable_cpus(proc: Path = _PROC) -> int:
    """Return how many CPUs this process may use, by its affinity and quotas."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(bound, quota(proc) or bound)


def quota(proc: Path = _PROC) -> int | None:
    """Return the CPU quota of the group in CPUs, rounded up; None if there is none."""
    return min((found for folder in _folders("cpu", proc) if (found := _quota(folder))), default=None)


def memory(proc: Path = _PROC) -> int | None:
    """Return the memory limit of the group in bytes; None if there is none."""
    return _least("memory", ("memory.max", "memory.limit_in_bytes"), proc)


def tasks(proc: Path = _PROC) -> int | None:
    """Return the limit on processes and threads of the group; None if there is none."""
    return _least("pids", ("pids.max",), proc)


def _least(controller: str, names: tuple[str, ...], proc: Path) -> int | None:
    texts = (text_of(folder / name) for folder in _folders(controller, proc) for name in names)
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def _quota(folder: Path) -> int | None:
    """Return a group's CPU quota in CPUs, rounded up; None if it has none (``max`` or -1)."""
    words = text_of(folder / "cpu.max").split() or [
        text_of(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    if not all(word.isdecimal() for word in words):
        return None
    quota, period = map(int, words)
    return max(1, math.ceil(quota / period))


def oom_kills() -> int | None:
    """Return how many processes of the group the out-of-memory killer has killed; None if the kernel does not count.

    The count of cgroup v2 includes child groups. Parent groups count other processes too, and are not used.
    """
    for mounted, group in _groups("memory", _PROC):
        for name in ("memory.events", "memory.oom_control"):
            counts = dict(line.split() for line in text_of(mounted / group / name).splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _folders(controller: str, proc: Path) -> Iterator[Path]:
    """Yield the directories of this process's group and of all visible parent groups."""
    for mounted, group in _groups(controller, proc):
        yield from (mounted / each for each in (group, *group.parents))


def _groups(controller: str, proc: Path) -> Iterator[tuple[Path, PurePosixPath]]:
    """Yield the mount point of each hierarchy of a controller, and this process's group in it."""
    lines = [line.split(":", 2) for line in text_of(proc / "cgroup").splitlines()]
    groups = {key: path for _, keys, path in lines for key in keys.split(",")}  # cgroup v2 has an empty key.
    for root, mounted, kind, options in _mounts(proc):
        key = "" if kind == "cgroup2" else controller
        if key in groups and (kind == "cgroup2" or (kind == "cgroup" and controller in options)):
            path = PurePosixPath(groups[key])
            # A container may see its group's name on the host, of which only the mounted part exists here.
            is_inside = path.is_relative_to(root) and ".." not in path.parts
            yield mounted, path.relative_to(root) if is_inside else PurePosixPath()


def _mounts(proc: Path) -> Iterator[tuple[str, Path, str, list[str]]]:
    """Yield the mounts: directory in the file system, mount point, type, options (man 5 proc)."""
    for line in text_of(proc / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        root, mounted = before.split()[3:5]
        kind, *_, options = after.split()
        yield root, Path(mounted), kind, options.split(",")
