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
from dataclasses import asdict
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
            os.write(descriptor, f"\n{COLLECTIVE}{json.dumps(found and asdict(found))}\n".encode())


def _pending() -> Collective | None:
    """Return the oldest collective that this process has started and not completed, of all process groups.

    Sends and receives are left out: two ranks of a pair are in different ones. None also where another version of torch
    has other arguments, or another form.
    """
    entries: list[Mapping[str, Any]] = []
    with contextlib.suppress(TypeError, ValueError, RuntimeError, LookupError, pickle.UnpicklingError):
        for name in _DUMPS:
            if dump := getattr(sys.modules.get("torch._C._distributed_c10d"), name, None):
                entries += pickle.loads(dump(includeStackTraces=False, onlyActive=True))["entries"]
        # Over gloo no state but ``retired`` changes.
        active = [each for each in entries if not (each["retired"] or each["is_p2p"] or each["state"] == "completed")]
        return _described(min(active, key=lambda entry: entry["time_created_ns"])) if active else None
    return None


def _described(entry: Mapping[str, Any]) -> Collective:
    name, group = entry["profiling_name"].rpartition(":")[2], entry["process_group"][0]
    types, size = entry["input_dtypes"], 0
    if _BYTES.keys() >= {*types}:  # Else it is not known, rather than that of some of the tensors.
        size = sum(prod(shape) * _BYTES[dtype] for shape, dtype in zip(entry["input_sizes"], types, strict=True))
    return Collective(name, entry["collective_seq_id"], size, group)
