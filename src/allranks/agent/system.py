"""The few things that Linux offers and Python's standard library does not wrap.

Each is a no-op where the system lacks it: without them a rank that outlives a killed parent is found
later instead of being ended by the kernel.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
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
    me, found = os.getpid(), []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text(errors="replace")
        except OSError:
            continue  # It ended while we looked.
        # The name in brackets may hold anything, brackets and spaces too: fields count from the last ')'.
        if int(text.rpartition(")")[2].split()[1]) == me:
            found.append(int(entry.parent.name))
    return found
