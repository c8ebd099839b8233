"""Processes of this machine, told apart for good: a process id alone may come to name another process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from allranks.runs.status import Handle


def identify(pid: int) -> Handle:
    """Return a handle that names the process ``pid`` of this machine and no later one."""
    return Handle(host=socket.gethostname(), pid=pid, started=_started(pid), extra={"boot": _boot()})


def is_here(handle: Handle) -> bool:
    """Tell whether the handle's process is, or was, one of this machine."""
    return handle.host == socket.gethostname()


def is_alive(handle: Handle) -> bool:
    """Tell whether the handle's process, of this machine, is alive."""
    if handle.pid is None or handle.extra.get("boot") != _boot():
        return False
    return _started(handle.pid) == handle.started is not None


def await_end(handle: Handle, seconds: float) -> bool:
    """Wait until the handle's process has ended, at most ``seconds``; tell whether it has."""
    deadline = time.monotonic() + seconds
    while is_alive(handle):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def send(handle: Handle, number: int) -> None:
    """Send a signal to the handle's process, if it is alive."""
    if is_alive(handle) and handle.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(handle.pid, number)


def await_ranks(pids: Iterable[int], run_id: str, seconds: float) -> bool:
    """Wait until none of the run's ranks is alive, at most ``seconds``; tell whether none is."""
    deadline = time.monotonic() + seconds
    left = list(pids)
    while left := [pid for pid in left if _runs(pid, run_id)]:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def kill_ranks(pids: Iterable[int], run_id: str) -> None:
    """Kill the process groups of the run's ranks."""
    for pid in pids:
        if _runs(pid, run_id):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _runs(pid: int, run_id: str) -> bool:
    """Tell from its environment whether a process is a rank of the run; a dead or foreign one is not."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return run_id.encode() in environment


def _started(pid: int) -> float | None:
    """Return the start time of a living process in the kernel's clock ticks (man 5 proc); None for a dead one."""
    if sys.platform != "linux":
        return _started_elsewhere(pid)
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else float(fields[19])


def _started_elsewhere(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
