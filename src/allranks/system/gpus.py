"""The GPUs of this machine, by the library of NVIDIA's driver (NVML)."""

from __future__ import annotations

import ctypes
from typing import Any


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Gpus:
    """The GPUs of this machine, by NVML (its functions and structures: the NVML API reference, nvml.h).

    It needs no CUDA context, so no memory of a GPU, and nothing but the driver's own library.

    Attributes:
        count: how many there are, those that do not answer included.
    """

    def __init__(self) -> None:
        self._library: Any = None
        self._devices: list[ctypes.c_void_p] = []
        self.count = 0
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return  # No driver: no GPUs.
        count = ctypes.c_uint()
        if self._library.nvmlInit_v2() or self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        self.count = count.value
        for number in range(self.count):
            device = ctypes.c_void_p()
            if not self._library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)):
                self._devices.append(device)

    def sample(self) -> list[dict[str, int]]:
        """Return the percentage of time that each GPU was busy, and its memory in bytes."""
        found = []
        for device in self._devices:
            rates, memory = _Rates(), _Memory()
            failed = self._library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates))
            if not (failed or self._library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))):
                found.append({"busy": rates.gpu, "memory": memory.used, "total": memory.total})
        return found
