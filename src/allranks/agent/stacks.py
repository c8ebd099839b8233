"""Stacks of ranks on request: faulthandler writes them from a signal handler in C, whatever the rank is doing.

Only that of the main thread, which gets the signal: to walk the frames of threads that run can crash the process
(python/cpython issue 116008). A system call that the signal interrupts is restarted by the kernel or by Python.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.agent import flight_recorder
from allranks.system.processes import catches, ignores, signal_process, stuck_state

#: One that no library and no scheduler is known to use.
_SIGNAL = signal.SIGRTMAX - 1
_LOOK_SECONDS = 1.0


def enable(path: Path, mode: int) -> None:
    """Have this process write the Python stack of its main thread to a file when it is asked for it.

    Raises:
        OSError: the file cannot be created.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    os.fchmod(descriptor, mode)  # Whatever the user's umask is, which the rank has.
    faulthandler.register(_SIGNAL, os.fdopen(descriptor, "wb", 0), all_threads=False)
    if "torch" in sys.modules:
        flight_recorder.serve(descriptor)


def _is_enabled(pid: int) -> bool:
    """Return whether a process has our handler: any other could pass the signal on, or be ended by it."""
    if not catches(pid, _SIGNAL):
        return False
    try:
        with os.scandir(f"/proc/{pid}/fd") as links:
            return any(os.readlink(link.path).endswith(contract.STACKS_SUFFIX) for link in links)  # noqa: PTH115
    except OSError:
        return False


def request(pids: Iterable[int]) -> dict[int, bool]:
    """Have processes write their stacks, which takes some milliseconds.

    Returns:
        The processes that do, and whether each adds its pending collective a little later.
    """
    able = {pid: ignores(pid, flight_recorder.SIGNAL) for pid in pids if _is_enabled(pid)}
    for pid, has_recorder in able.items():
        signal_process(pid, _SIGNAL)
        if has_recorder:
            signal_process(pid, flight_recorder.SIGNAL)
    return able


class StackRequests:
    """Passes requests of the launcher, a file in the attempt's directory, on to the ranks of this node."""

    def __init__(self, folder: Path, mode: int) -> None:
        self._folder, self._request, self._mode = folder, folder.parent / contract.STACKS_REQUEST, mode
        self._next = 0.0
        self._newest = self._answered = 0  # A request may be there before this agent is.
        self._found: Collection[int] = ()
        self._asked: dict[int, bool] = {}

    def tick(self, find: Callable[[], Collection[int]]) -> None:
        """Pass a new request on to the ranks whose process ids ``find`` returns, and answer it a second later."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + _LOOK_SECONDS
        if self._newest != self._answered:
            self._answer()
        elif (newest := self._requested()) != self._answered:
            self._newest = newest
            self._found = [*find()]
            self._asked = request(self._found)

    def _answer(self) -> None:
        self._answered = self._newest
        answer = self._folder / contract.STACKS
        temporary = answer.with_name(f".{answer.name}")
        try:
            for written in self._folder.glob(f"*{contract.STACKS_SUFFIX}"):
                written.stat()  # Over NFS others see what a rank has written once its node is asked for the size.
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._mode), "w") as stream:
                stream.write(json.dumps({"request": self._answered, "pids": self._told()}))
            temporary.replace(answer)
        except OSError:
            pass  # The disk is full or gone: the launcher says that this node did not answer.

    def _told(self) -> dict[int, dict[str, Any]]:
        return {
            pid: {"stack": pid in self._asked, "recorder": self._asked.get(pid, False), "state": stuck_state(pid)}
            for pid in self._found
        }

    def _requested(self) -> int:
        try:
            return os.stat(self._request).st_mtime_ns  # noqa: PTH116 - once a second, and quicker
        except OSError:
            return 0
