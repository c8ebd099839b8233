"""Processes of this machine, told apart for good: a process id alone may come to name another process."""

from __future__ import annotations

import signal
import socket
import time

from allranks import processes
from allranks.runs.status import Handle

_KILL_PATIENCE = 10.0


def identify(pid: int) -> Handle:
    """Return a handle that names the process ``pid`` of this machine and no later one."""
    return Handle(
        host=socket.gethostname(), pid=pid, started=processes.started(pid), extra={"boot": processes.boot_id()}
    )


def is_alive(handle: Handle) -> bool:
    """Tell whether the handle's process, of this machine, is alive."""
    if handle.pid is None or handle.extra.get("boot") != processes.boot_id():
        return False
    return processes.started(handle.pid) == handle.started is not None


def await_end(handle: Handle, seconds: float) -> bool:
    """Wait until the handle's process has ended, at most ``seconds``; tell whether it has."""
    deadline = time.monotonic() + seconds
    while is_alive(handle):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def send(handle: Handle, number: int) -> None:
    """Send a signal to the process group that the handle's process leads, if it is alive."""
    if is_alive(handle) and handle.pid is not None:
        processes.signal_group(handle.pid, number)


def kill_group(handle: Handle) -> None:
    """Kill what is left of the process group that the handle's process led until just now."""
    if handle.pid is not None and not is_alive(handle):
        processes.signal_group(handle.pid, signal.SIGKILL)


def any_marked(name: str, value: str) -> bool:
    """Tell whether a process that was started with a variable of that value is alive."""
    return bool(processes.marked(name, value))


def end_marked(name: str, value: str, patience: float) -> bool:
    """End every process that was started with a variable of that value: SIGTERM, patience, SIGKILL.

    Tells whether none is left.
    """
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, _KILL_PATIENCE)):
        for pid in processes.marked(name, value):
            processes.signal_process(pid, number)
        deadline = time.monotonic() + seconds
        while processes.marked(name, value):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        else:
            return True
    return False
