"""The collective that a rank has started and not completed, on request, from torch's flight recorder.

torch records the newest collectives of each process group by itself (TORCH_FR_BUFFER_SIZE, by default 2000). It gives
them to the process alone that records them: a thread of each rank sleeps in a system call until the agent requests
them. It needs the interpreter's lock, which ranks give away while they wait for others.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Mapping
from math import prod
from typing import Any

from allranks.record.stacks import COLLECTIVE, Collective

#: One that no library and no scheduler is known to use.
SIGNAL = signal.SIGRTMAX - 2
#: torch's functions for NCCL and for other backends: a rank may use both.
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")
_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "Byte": 1, "Char": 1}
#: The main thread has written its stack if the file has not grown for so long.
_QUIET_SECONDS = 0.1


def serve(descriptor: int) -> None:
    """Have this process write its pending collective to a file, behind its stack, each time it gets ``SIGNAL``."""
    # Ignored if the script unblocks it; while it is blocked it waits for sigwait() all the same.
    signal.signal(SIGNAL, signal.SIG_IGN)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with contextlib.suppress(RuntimeError):  # The system allows no thread: there is a stack only.
            _thread.start_new_thread(_serve, (descriptor,))  # Not one of threading's, which scripts list and join.
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, {*before, SIGNAL})


def _serve(descriptor: int) -> None:
    while True:
        signal.sigwait({SIGNAL})
        size = -1
        while size != (size := os.fstat(descriptor).st_size):
            time.sleep(_QUIET_SECONDS)
        found = _pending()
        with contextlib.suppress(OSError):  # The disk is full.
            os.write(descriptor, f"\n{COLLECTIVE}{json.dumps(found and found.__dict__)}\n".encode())


def _pending() -> Collective | None:
    """Return the oldest collective that this process has started and not completed, of all process groups."""
    entries: list[Mapping[str, Any]] = []
    for name in _DUMPS:
        if dump := getattr(sys.modules.get("torch._C._distributed_c10d"), name, None):
            # Another version of torch may have other arguments, or another form.
            with contextlib.suppress(TypeError, ValueError, RuntimeError, KeyError, pickle.UnpicklingError):
                entries += pickle.loads(dump(includeStackTraces=False, onlyActive=True))["entries"]
    # Over gloo no state but ``retired`` changes.
    active = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    return _described(min(active, key=lambda entry: entry["time_created_ns"])) if active else None


def _described(entry: Mapping[str, Any]) -> Collective:
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    inputs = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    size = sum(prod(shape) * _BYTES.get(dtype, 0) for shape, dtype in inputs)
    return Collective(entry["profiling_name"].rpartition(":")[2], number, size, entry["process_group"][0])
