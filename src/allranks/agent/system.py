"""The few things that Linux offers and Python's standard library does not wrap.

Each is a no-op where the system lacks it: without them a rank that outlives a killed parent is found
later instead of being ended by the kernel.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
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
    me = os.getpid()
    try:
        # Of the main thread, and a starter has no other. Not every kernel is built with it.
        return [int(pid) for pid in Path(f"/proc/self/task/{me}/children").read_text().split()]
    except OSError:
        return [pid for pid in _processes() if _parent(pid) == me]


def marked(name: str, value: str) -> list[int]:
    """Return the processes that were started with a variable of that value, but for us and our ancestors."""
    needle, ours = f"\0{name}={value}\0".encode(errors="surrogateescape"), set(_lineage())
    return [pid for pid in _processes() if pid not in ours and needle in b"\0" + _environment(pid)]


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process; it may be gone, or no longer ours."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # It has ended, or it belongs to somebody else now.


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group; it may be empty, or no longer ours."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # It has ended, or holds only processes that are no longer ours to signal.


def _processes() -> Iterator[int]:
    """Yield the ids of this machine's processes; none where there is no /proc."""
    yield from (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))


def _environment(pid: int) -> bytes:
    """Return what a process was started with; nothing for a dead one, or one of another user."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _lineage() -> Iterator[int]:
    pid: int | None = os.getpid()
    while pid:
        yield pid
        pid = _parent(pid)


def _parent(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None  # It ended while we looked.
    # The name in brackets may hold anything, brackets and spaces too: fields count from the last ')'.
    return int(text.rpartition(")")[2].split()[1])
