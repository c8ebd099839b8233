"""The few things that Linux offers and Python's standard library does not wrap."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from allranks.processes import parent_of, process_ids

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, which forked it, ends (man 2 prctl)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none slips away (man 2 prctl)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def thread_count() -> int:
    """Count the threads of this process, those of C libraries included; 1 where it cannot be told."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 1


def children() -> list[int]:
    """Return the process ids of this process's children; empty where there is no /proc."""
    me = os.getpid()
    try:
        # Of the main thread, and a starter has no other. Not every kernel is built with it.
        return [int(pid) for pid in Path(f"/proc/self/task/{me}/children").read_text().split()]
    except OSError:
        return [pid for pid in process_ids() if parent_of(pid) == me]
