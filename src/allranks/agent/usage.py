"""What this run's ranks use of their node: CPU and memory from /proc, GPUs from NVIDIA's management library."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from allranks.processes import process_ids, stat_fields

_SECONDS = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Places in /proc/<pid>/stat, counted from the state on (man 5 proc).
_GROUP, _USER, _SYSTEM, _RESIDENT = 2, 11, 12, 21


class Usage:
    """Notes every two seconds what the ranks' process groups use, in a file that ``allranks top`` reads.

    Args:
        path: the file.
        mode: its permissions.
    """

    def __init__(self, path: Path, mode: int) -> None:
        self._path, self._mode = path, mode
        self._next = 0.0
        self._before: tuple[float, float] | None = None
        self._gpus: Gpus | None = None
        self._thread: threading.Thread | None = None

    def is_due(self) -> bool:
        """Tell whether it is time for a sample."""
        return time.monotonic() >= self._next

    def tick(self, groups: Collection[int]) -> None:
        """Take a sample when it is time to, of the process groups with these ids.

        GPUs are asked in a thread: their driver may take seconds, or hang, and the agent must not.
        """
        if not self.is_due() or not groups or (self._thread and self._thread.is_alive()):
            return
        now = time.monotonic()
        self._next = now + _SECONDS
        seconds, memory = _used(groups)
        (then, spent), self._before = self._before or (now, seconds), (now, seconds)
        cpus = max(0.0, seconds - spent) / (now - then) if now > then else 0.0
        sample = {"host": socket.gethostname(), "time": time.time(), "cpus": round(cpus, 3), "memory": memory}
        self._thread = threading.Thread(target=self._complete, args=(sample,), name="allranks-usage", daemon=True)
        self._thread.start()

    def _complete(self, sample: dict[str, Any]) -> None:
        self._gpus = self._gpus or Gpus()
        self._write({**sample, "gpus": self._gpus.sample()})

    def _write(self, sample: dict[str, Any]) -> None:
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


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Gpus:
    """The GPUs of this node, by NVML (its functions and structures: the NVML API reference, nvml.h).

    It needs no CUDA context, so no memory of a GPU, and nothing but the driver's own library.
    """

    def __init__(self) -> None:
        self._library: Any = None
        self._devices: list[ctypes.c_void_p] = []
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return  # No driver: no GPUs.
        count = ctypes.c_uint()
        if self._library.nvmlInit_v2() or self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        for number in range(count.value):
            device = ctypes.c_void_p()
            if not self._library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)):
                self._devices.append(device)

    def sample(self) -> list[dict[str, int]]:
        """Give the percentage of time that each GPU was busy, and its memory in bytes."""
        return [found for device in self._devices if (found := self._look(device))]

    def _look(self, device: ctypes.c_void_p) -> dict[str, int]:
        rates, memory = _Rates(), _Memory()
        if self._library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)):
            return {}
        if self._library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            return {}
        return {"busy": rates.gpu, "memory": memory.used, "total": memory.total}
