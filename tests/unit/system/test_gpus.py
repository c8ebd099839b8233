"""What agents sample of GPUs, by a stand-in for the driver's library that takes only what the real one takes."""

# ruff: noqa: N802 - the names are the library's

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from allranks.system.gpus import Gpus

#: Of nvml.h: what calls return, the clock of the multiprocessors, and the only sensor.
SUCCESS, INVALID_ARGUMENT, NOT_SUPPORTED, GPU_IS_LOST = 0, 2, 3, 15
CLOCK_SM, SENSOR_GPU = 1, 0
IDLE, POWER_CAP, HARDWARE, SW_THERMAL, HW_THERMAL, BRAKE = 0x1, 0x4, 0x8, 0x20, 0x40, 0x80


class Card:
    """A GPU as the driver knows it; what is None it does not support."""

    def __init__(self, number: int) -> None:
        self.uuid = f"GPU-{number}{number}{number}{number}"
        self.clock: int | None = 1755
        self.reasons = 0
        self.is_lost = False


class Nvml:
    """libnvidia-ml.so.1: a pointer to another type than a function's own is an error here, and none in C."""

    def __init__(self, cards: list[Card], *, is_old: bool = False) -> None:
        self.cards, self._is_old, self._is_up = cards, is_old, False

    def __getattr__(self, name: str) -> Callable[..., int]:
        if self._is_old and name == "nvmlDeviceGetCurrentClocksEventReasons":
            raise AttributeError(f"undefined symbol: {name}")
        raise AssertionError(f"{name} is not known here")

    def _card(self, handle: ctypes.c_void_p) -> Card:
        assert self._is_up
        assert type(handle) is ctypes.c_void_p
        return self.cards[(handle.value or 0) - 1]

    def nvmlInit_v2(self) -> int:
        self._is_up = True
        return SUCCESS

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        return _put(count, ctypes.c_uint, len(self.cards))

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, handle: Any) -> int:
        return GPU_IS_LOST if self.cards[number].is_lost else _put(handle, ctypes.c_void_p, number + 1)

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, text: Any, length: ctypes.c_uint) -> int:
        uuid = self._card(handle).uuid.encode()
        assert type(length) is ctypes.c_uint
        assert len(uuid) < length.value <= len(text)
        text.value = uuid
        return SUCCESS

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, rates: Any) -> int:
        if self._card(handle).is_lost:
            return GPU_IS_LOST
        rates._obj.gpu, rates._obj.memory = 97, 40
        return SUCCESS

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.total, memory._obj.free, memory._obj.used = 80, 48, 32
        return SUCCESS

    def nvmlDeviceGetTemperature(self, handle: ctypes.c_void_p, sensor: ctypes.c_int, degrees: Any) -> int:
        return _put(degrees, ctypes.c_uint, 64) if _is(sensor, SENSOR_GPU) else INVALID_ARGUMENT

    def nvmlDeviceGetMaxClockInfo(self, handle: ctypes.c_void_p, kind: ctypes.c_int, mhz: Any) -> int:
        return _put(mhz, ctypes.c_uint, 1980) if _is(kind, CLOCK_SM) else INVALID_ARGUMENT

    def nvmlDeviceGetClockInfo(self, handle: ctypes.c_void_p, kind: ctypes.c_int, mhz: Any) -> int:
        clock = self._card(handle).clock
        return NOT_SUPPORTED if clock is None else _put(mhz, ctypes.c_uint, clock)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: ctypes.c_void_p, bits: Any) -> int:
        return _put(bits, ctypes.c_ulonglong, self._card(handle).reasons)


class NewNvml(Nvml):
    """That of a driver that knows the reasons by their newer name."""

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: ctypes.c_void_p, bits: Any) -> int:
        return self.nvmlDeviceGetCurrentClocksThrottleReasons(handle, bits)


def _is(given: ctypes.c_int, wanted: int) -> bool:
    assert type(given) is ctypes.c_int
    return given.value == wanted


def _put(pointer: Any, kind: type[Any], value: int) -> int:
    assert type(pointer._obj) is kind
    pointer._obj.value = value
    return SUCCESS


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[Card]:
    """Four GPUs, and the library that knows them."""
    found = [Card(number) for number in range(4)]
    library = NewNvml(found)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libnvidia-ml.so.1": library}[name])
    return found


def _sampled(gpus: Gpus, times: int = 1) -> list[dict[str, Any]]:
    found = [gpus.sample() for _ in range(times)]
    return found[-1]


def test_what_is_sampled_of_a_gpu(cards: list[Card]) -> None:
    gpus = Gpus()
    assert gpus.count == 4
    first, *_ = gpus.sample()
    own = {"number": 0, "busy": 97, "memory": 32, "total": 80, "temperature": 64}
    assert first == {**own, "clock": 1755, "max_clock": 1980, "slowed_by": []}


def test_a_clock_is_the_median_of_a_minute_and_a_reason_lasts_half_of_it(cards: list[Card]) -> None:
    gpus = Gpus()
    _sampled(gpus, 30)
    cards[1].clock, cards[1].reasons = 1110, HARDWARE | HW_THERMAL
    assert (_sampled(gpus, 14)[1]["clock"], gpus.sample()[1]["slowed_by"]) == (1755, ["thermal"])
    assert _sampled(gpus, 1)[1]["clock"] == 1110
    cards[1].clock, cards[1].reasons = 1755, 0
    assert (_sampled(gpus, 16)[1]["clock"], gpus.sample()[1]["slowed_by"]) == (1755, [])


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (IDLE, []),
        (POWER_CAP, ["power cap"]),
        (HARDWARE, ["hardware slowdown"]),
        (HARDWARE | BRAKE, ["power brake"]),
        (SW_THERMAL | HW_THERMAL | POWER_CAP, ["power cap", "thermal"]),
        (0x1000, []),
    ],
)
def test_reasons_in_the_words_of_nvidia_smi(cards: list[Card], bits: int, reasons: list[str]) -> None:
    cards[0].reasons = bits
    assert _sampled(Gpus(), 15)[0]["slowed_by"] == reasons


def test_an_older_driver_knows_the_reasons_by_another_name(cards: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml(cards, is_old=True))
    cards[0].reasons = SW_THERMAL
    assert _sampled(Gpus(), 15)[0]["slowed_by"] == ["thermal"]


def test_what_a_gpu_does_not_report_is_none_and_one_that_is_lost_is_left_out(cards: list[Card]) -> None:
    cards[0].clock = None
    cards[1].is_lost = True
    gpus = Gpus()
    cards[2].is_lost = True
    found = gpus.sample()
    assert (gpus.count, [gpu["number"] for gpu in found]) == (4, [0, 3])
    assert (found[0]["clock"], found[0]["slowed_by"], found[0]["busy"]) == (None, [], 97)


@pytest.mark.parametrize(
    ("visible", "clocks"),
    [
        (None, [1000, 1001, 1002, 1003]),
        ("2,0", [1002, 1000]),
        (" GPU-3333, GPU-1 ", [1003, 1001]),
        ("", []),
        ("MIG-0000", [1000, 1001, 1002, 1003]),
        ("0,GPU-9", [1000, 1001, 1002, 1003]),
    ],
)
def test_visible_gpus_are_counted_as_cuda_counts_them(
    cards: list[Card], visible: str | None, clocks: list[int]
) -> None:
    for number, card in enumerate(cards):
        card.clock = 1000 + number
    found = Gpus(visible).sample()
    assert [(gpu["number"], gpu["clock"]) for gpu in found] == [*enumerate(clocks)]


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert (Gpus().count, Gpus("0").sample()) == (0, [])
