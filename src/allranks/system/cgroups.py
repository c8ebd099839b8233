"""What the control groups of this process allow it: those of its container, of systemd, of a scheduler.

A group is bound by those around it too, and each kind of limit may be in a hierarchy of its own (cgroup v1).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from allranks.system.processes import text_of

_PROC = Path("/proc/self")


def usable_cpus(proc: Path = _PROC) -> int:
    """Return how many CPUs this process may use: of those that it is bound to as many as quotas allow."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(bound, quota(proc) or bound)


def quota(proc: Path = _PROC) -> int | None:
    """Return the CPUs that all processes of the group may use at a time, rounded up; None: as many as there are."""
    return min((found for folder in _folders("cpu", proc) if (found := _quota(folder))), default=None)


def memory(proc: Path = _PROC) -> int | None:
    """Return how many bytes of memory all processes of the group may have; None: as many as there are."""
    return _least("memory", ("memory.max", "memory.limit_in_bytes"), proc)


def tasks(proc: Path = _PROC) -> int | None:
    """Return how many processes and threads there may be in the group; None: any number."""
    return _least("pids", ("pids.max",), proc)


def _least(controller: str, names: tuple[str, ...], proc: Path) -> int | None:
    texts = (text_of(folder / name) for folder in _folders(controller, proc) for name in names)
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def _quota(folder: Path) -> int | None:
    """Return the CPUs that a group's quota allows, rounded up, if it has one: ``max``, or -1, is none."""
    words = text_of(folder / "cpu.max").split() or [
        text_of(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    if not all(word.isdecimal() for word in words):
        return None
    quota, period = map(int, words)
    return max(1, math.ceil(quota / period))


def oom_kills() -> int | None:
    """Return how many processes of the group the kernel has killed because memory ran out; None if it keeps no count.

    A count of version 2 has those of the groups inside it too; groups around it count others, and are left out.
    """
    for mounted, group in _groups("memory", _PROC):
        for name in ("memory.events", "memory.oom_control"):
            counts = dict(line.split() for line in text_of(mounted / group / name).splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _folders(controller: str, proc: Path) -> Iterator[Path]:
    """Yield the directories of this process's group, and of all around it that can be seen from here."""
    for mounted, group in _groups(controller, proc):
        yield from (mounted / each for each in (group, *group.parents))


def _groups(controller: str, proc: Path) -> Iterator[tuple[Path, PurePosixPath]]:
    """Yield where the hierarchies of a controller are mounted, and this process's group in them."""
    lines = [line.split(":", 2) for line in text_of(proc / "cgroup").splitlines()]
    groups = {key: path for _, keys, path in lines for key in keys.split(",")}  # That of cgroup v2 has an empty key.
    for root, mounted, kind, options in _mounts(proc):
        key = "" if kind == "cgroup2" else controller
        if key in groups and (kind == "cgroup2" or (kind == "cgroup" and controller in options)):
            path = PurePosixPath(groups[key])
            # A container may see its group's name outside, of which it sees no more than what is mounted.
            is_inside = path.is_relative_to(root) and ".." not in path.parts
            yield mounted, path.relative_to(root) if is_inside else PurePosixPath()


def _mounts(proc: Path) -> Iterator[tuple[str, Path, str, list[str]]]:
    """Yield what is mounted: which directory of the file system, where, its kind, its options (man 5 proc)."""
    for line in text_of(proc / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        root, mounted = before.split()[3:5]
        kind, *_, options = after.split()
        yield root, Path(mounted), kind, options.split(",")
