"""Processes of this machine: found by what they were started with, signalled, told apart.

Needs only the standard library: a run carries it to its nodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def marked(name: str, value: str) -> list[int]:
    """Return the processes that were started with a variable of that value, but for us and our ancestors."""
    needle, ours = f"\0{name}={value}\0".encode(errors="surrogateescape"), set(_lineage())
    return [pid for pid in process_ids() if pid not in ours and needle in b"\0" + _environment(pid)]


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


def process_ids() -> Iterator[int]:
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
        pid = parent_of(pid)


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None for one that is gone."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def stat_fields(pid: int) -> list[str]:
    """Return what the kernel tells of a process from its state on (man 5 proc); nothing for one that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []  # It ended while we looked.
    # The name in brackets may hold anything, brackets and spaces too: fields count from the last ')'.
    return text.rpartition(")")[2].split()
