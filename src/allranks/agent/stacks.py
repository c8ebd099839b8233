"""Stacks of ranks on request: faulthandler writes them from a signal handler in C, whatever the rank is doing.

Only the main thread's stack is written: walking the frames of running threads can crash the process (python/cpython
issue 116008). The kernel or Python restarts a system call that the signal interrupts.

With the stack comes the pending collective (started, not completed) from torch's flight recorder, which keeps the
newest collectives of each process group (TORCH_FR_BUFFER_SIZE, by default 2000). Only the rank itself can read them: a
thread of each rank sleeps in a system call until the agent requests them. The thread needs the GIL, which ranks release
while they wait for others.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.record.stacks import COLLECTIVE, Collective
from allranks.system.processes import catches, ignores, signal_process, stuck_state

#: Signals that request a stack and a collective. No library or scheduler is known to use them.
_STACK, _PENDING = signal.SIGRTMAX - 1, signal.SIGRTMAX - 2
_LOOK_SECONDS = 1.0
#: torch's functions for NCCL and for other backends; a rank may use both.
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")
_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "Byte": 1, "Char": 1}
#: The stack is complete if the file has not grown for this long.
_QUIET_SECONDS = 0.1


# --- in a rank ---


def enable(path: Path, mode: int) -> None:
    """Create a file, and have this process append the Python stack of its main thread on each request."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    os.fchmod(descriptor, mode)  # Independent of the user's umask.
    faulthandler.register(_STACK, os.fdopen(descriptor, "wb", 0), all_threads=False)
    if "torch" in sys.modules:
        _serve_collectives(descriptor)


def _serve_collectives(descriptor: int) -> None:
    """Have this process append its pending collective to the file on each ``_PENDING`` signal."""
    # Harmless if the script unblocks it; while blocked, sigwait() still receives it.
    signal.signal(_PENDING, signal.SIG_IGN)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with contextlib.suppress(RuntimeError):  # No further thread is allowed: only stacks are available.
            # Not a threading.Thread: scripts list and join those.
            _thread.start_new_thread(_write_collectives, (descriptor,))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, {*before, _PENDING})


def _write_collectives(descriptor: int) -> None:
    while True:
        signal.sigwait({_PENDING})
        size = -1
        while size != (size := os.fstat(descriptor).st_size):
            time.sleep(_QUIET_SECONDS)
        found = _pending_collective()
        with contextlib.suppress(OSError):  # The disk is full.
            os.write(descriptor, f"\n{COLLECTIVE}{json.dumps(found and found._asdict())}\n".encode())


def _pending_collective() -> Collective | None:
    """Return the oldest pending collective of all process groups; None if there is none.

    Sends and receives are left out, because the two ranks of a pair are in different operations. Also None if this
    version of torch has other arguments, or another format.
    """
    entries: list[Mapping[str, Any]] = []
    with contextlib.suppress(TypeError, ValueError, RuntimeError, LookupError, pickle.UnpicklingError):
        for name in _DUMPS:
            if dump := getattr(sys.modules.get("torch._C._distributed_c10d"), name, None):
                entries += pickle.loads(dump(includeStackTraces=False, onlyActive=True))["entries"]
        # Gloo updates no state but ``retired``.
        active = [each for each in entries if not (each["retired"] or each["is_p2p"] or each["state"] == "completed")]
        return _described(min(active, key=lambda entry: entry["time_created_ns"])) if active else None
    return None


def _described(entry: Mapping[str, Any]) -> Collective:
    name, group = entry["profiling_name"].rpartition(":")[2], entry["process_group"][0]
    types, size = entry["input_dtypes"], 0
    if _BYTES.keys() >= {*types}:  # Else the size is unknown.
        size = sum(prod(shape) * _BYTES[dtype] for shape, dtype in zip(entry["input_sizes"], types, strict=True))
    return Collective(name, entry["collective_seq_id"], size, group)


# --- in the agent ---


def _is_enabled(pid: int) -> bool:
    """Return whether a process has our signal handler: another program might forward the signal, or die of it."""
    if not catches(pid, _STACK):
        return False
    try:
        with os.scandir(f"/proc/{pid}/fd") as links:
            return any(os.readlink(link.path).endswith(contract.STACKS_SUFFIX) for link in links)  # noqa: PTH115
    except OSError:
        return False


def request(pids: Iterable[int]) -> dict[int, bool]:
    """Request the stacks of processes, which takes some milliseconds.

    Returns:
        The processes that write one, and whether each appends its pending collective a little later.
    """
    able = {pid: ignores(pid, _PENDING) for pid in pids if _is_enabled(pid)}
    for pid, has_recorder in able.items():
        signal_process(pid, _STACK)
        if has_recorder:
            signal_process(pid, _PENDING)
    return able


class StackRequests:
    """Forwards requests of the launcher (a file in the attempt's directory) to the ranks of this node."""

    def __init__(self, folder: Path, mode: int) -> None:
        self._folder, self._request, self._mode = folder, folder.parent / contract.STACKS_REQUEST, mode
        self._next = 0.0
        self._newest = self._answered = 0  # A request may be there before this agent is.
        self._found: Collection[int] = ()
        self._able: dict[int, bool] = {}

    def tick(self, find: Callable[[], Collection[int]]) -> None:
        """Forward a new request to the ranks whose process ids ``find`` returns, and answer it a second later."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + _LOOK_SECONDS
        if self._newest != self._answered:
            self._answer()
        elif (newest := self._requested()) != self._answered:
            self._newest = newest
            self._found = [*find()]
            self._able = request(self._found)

    def _answer(self) -> None:
        self._answered = self._newest
        pids = {
            pid: {"stack": pid in self._able, "recorder": self._able.get(pid, False), "state": stuck_state(pid)}
            for pid in self._found
        }
        answer = self._folder / contract.STACKS
        temporary = answer.with_name(f".{answer.name}")
        try:
            for written in self._folder.glob(f"*{contract.STACKS_SUFFIX}"):
                written.stat()  # Over NFS this flushes the rank's writes, so that other nodes see them.
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._mode), "w") as stream:
                stream.write(json.dumps({"request": self._answered, "pids": pids}))
            temporary.replace(answer)
        except OSError:
            pass  # The disk is full or gone: the launcher says that this node did not answer.

    def _requested(self) -> int:
        try:
            return os.stat(self._request).st_mtime_ns  # noqa: PTH116 - once a second, and quicker
        except OSError:
            return 0
