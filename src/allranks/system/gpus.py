"""The GPUs of this machine, through the library of NVIDIA's driver (NVML)."""

from __future__ import annotations

import ctypes
import statistics
from collections import deque
from typing import Any

#: Constants of nvml.h: the clock of the multiprocessors, the sensor on the chip, and the length of a UUID.
_CLOCK_SM, _SENSOR_GPU, _UUID_BYTES = 1, 0, 96
#: Bits of nvmlClocksEventReason… in nvml.h, with nvidia-smi's names. Idle (0x1) does not count.
_REASONS = {
    0x02: "application clocks",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal",
    0x40: "thermal",
    0x80: "power brake",
    0x100: "display clocks",
}
#: The driver sets the first bit together with its cause.
_HARDWARE, _CAUSES = 0x08, 0x40 | 0x80
#: The second name is for drivers before version 535.
_EVENT_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
#: Number of samples for clocks (a minute of an agent's samples), and in how many of them a reason must be set.
_SAMPLES, _LASTING = 30, 15


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Gpus:
    """The GPUs of this machine, by NVML (its functions and structures: the NVML API reference, nvml.h).

    It needs only the driver's library: no CUDA context, and so no GPU memory.

    ``visible`` selects and orders the GPUs to sample, like CUDA_VISIBLE_DEVICES; None: all.
    """

    def __init__(self, visible: str | None = None) -> None:
        self._library: Any = None
        self._devices: dict[int, _Device] = {}
        self.count = 0  # All GPUs, including those that do not answer or are not visible.
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return  # No driver: no GPUs.
        count = ctypes.c_uint()
        if self._library.nvmlInit_v2() or self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        self.count = count.value
        handles = dict[int, ctypes.c_void_p]()
        for number in range(self.count):
            handle = ctypes.c_void_p()
            if not self._library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)):
                handles[number] = handle
        for place, number in enumerate(self._chosen(visible, handles)):
            if number in handles:
                self._devices[place] = _Device(self._library, handles[number])

    def sample(self) -> list[dict[str, Any]]:
        """Return a sample of each GPU that answers.

        ``number`` is CUDA's number, ``busy`` a percentage of time; ``memory`` and ``total`` are bytes. ``temperature``
        is in degrees Celsius, ``clock`` and ``max_clock`` in MHz; None if the GPU does not report it. The clock is the
        median over the last minute, and ``slowed_by`` lists what throttled it for at least half of that.
        """
        found = []
        for number, device in self._devices.items():
            if sample := device.sample():
                found.append({"number": number, **sample})
        return found

    def _chosen(self, visible: str | None, handles: dict[int, ctypes.c_void_p]) -> list[int]:
        """Return the numbers of the visible GPUs; of all GPUs if an entry is not a GPU, such as a MIG instance."""
        everyone = [*range(self.count)]
        if visible is None:
            return everyone
        uuids = {number: self._uuid(handle) for number, handle in handles.items()} if "GPU-" in visible else {}
        chosen = []
        for entry in filter(None, map(str.strip, visible.split(","))):
            named = [each for each in everyone if entry == str(each) or uuids.get(each, "").startswith(entry)]
            if len(named) != 1:
                return everyone
            chosen += named
        return chosen

    def _uuid(self, handle: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(_UUID_BYTES)
        failed = self._library.nvmlDeviceGetUUID(handle, text, ctypes.c_uint(_UUID_BYTES))
        return "" if failed else text.value.decode(errors="replace")


class _Device:
    """A GPU, with its clocks and throttle reasons in the last samples."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle
        self._clocks, self._reasons = deque[int](maxlen=_SAMPLES), deque[int](maxlen=_SAMPLES)
        self._max_clock = self._number("nvmlDeviceGetMaxClockInfo", ctypes.c_int(_CLOCK_SM))

    def sample(self) -> dict[str, Any] | None:
        rates, memory = _Rates(), _Memory()
        if self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates)):
            return None
        if self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)):
            return None
        clock = self._number("nvmlDeviceGetClockInfo", ctypes.c_int(_CLOCK_SM))
        if clock is not None:
            self._clocks.append(clock)
            self._reasons.append(self._event_reasons())
        return {
            "busy": rates.gpu,
            "memory": memory.used,
            "total": memory.total,
            "temperature": self._number("nvmlDeviceGetTemperature", ctypes.c_int(_SENSOR_GPU)),
            "clock": None if clock is None else int(statistics.median(self._clocks)),
            "max_clock": self._max_clock,
            "slowed_by": self._lasting(),
        }

    def _number(self, function: str, which: ctypes.c_int) -> int | None:
        number = ctypes.c_uint()
        failed = getattr(self._library, function)(self._handle, which, ctypes.byref(number))
        return None if failed else number.value

    def _event_reasons(self) -> int:
        bits = ctypes.c_ulonglong()
        for name in _EVENT_REASONS:
            function = getattr(self._library, name, None)
            if function and not function(self._handle, ctypes.byref(bits)):
                return bits.value & ~_HARDWARE if bits.value & _CAUSES else bits.value
        return 0

    def _lasting(self) -> list[str]:
        counts = dict.fromkeys(_REASONS.values(), 0)
        for bits in self._reasons:
            for reason in {reason for bit, reason in _REASONS.items() if bits & bit}:
                counts[reason] += 1
        return [reason for reason, count in counts.items() if count >= _LASTING]
