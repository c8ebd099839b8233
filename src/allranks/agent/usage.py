"""What this run's ranks use of their node: CPU and memory from /proc, GPUs from NVIDIA's management library."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from allranks.system.gpus import Gpus
from allranks.system.processes import process_ids, stat_fields

_SECONDS = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Places in /proc/<pid>/stat, counted from the state on (man 5 proc).
_GROUP, _USER, _SYSTEM, _RESIDENT = 2, 11, 12, 21


class Usage:
    """Records every two seconds what the ranks' process groups use, in a file that ``allranks top`` reads."""

    def __init__(self, path: Path, mode: int) -> None:
        self._path, self._mode = path, mode
        self._next = 0.0
        self._before: tuple[float, float] | None = None
        self._gpus: Gpus | None = None
        self._thread: threading.Thread | None = None

    def tick(self, find: Callable[[], Collection[int]]) -> None:
        """Take a sample when it is time to, of the process groups whose ids ``find`` returns."""
        now = time.monotonic()
        if now < self._next or (self._thread and self._thread.is_alive()) or not (groups := find()):
            return
        self._next = now + _SECONDS
        seconds, memory = _used(groups)
        (then, spent), self._before = self._before or (now, seconds), (now, seconds)
        cpus = max(0.0, seconds - spent) / (now - then) if now > then else 0.0
        sample = {"host": socket.gethostname(), "time": time.time(), "cpus": round(cpus, 3), "memory": memory}
        # In a thread: the driver of GPUs may take seconds, or hang, and the agent must not.
        self._thread = threading.Thread(target=self._write, args=(sample,), name="allranks-usage", daemon=True)
        self._thread.start()

    def _write(self, sample: dict[str, Any]) -> None:
        self._gpus = self._gpus or Gpus()
        sample["gpus"] = self._gpus.sample()
        temporary = self._path.with_name(f".{self._path.name}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._mode), "w") as stream:
                stream.write(json.dumps(sample))
            temporary.replace(self._path)
        except OSError:
            pass  # The disk is full or gone; the next sample may be written.


def _used(groups: Collection[int]) -> tuple[float, int]:
    """Return the seconds of CPU that process groups have used, and the bytes of memory that they hold."""
    ticks = pages = 0
    for pid in process_ids():
        fields = stat_fields(pid)
        if fields and int(fields[_GROUP]) in groups:
            ticks += int(fields[_USER]) + int(fields[_SYSTEM])
            pages += int(fields[_RESIDENT])
    return ticks / _TICKS, pages * _PAGE
