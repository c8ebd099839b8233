"""What a machine's GPUs tell of themselves, by NVIDIA's library for it (NVML). No context is made on them."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

from allranks.probe.gpu_devices import Device, ask, installed, visible
from allranks.probe.order import Order

#: One of them is there where NVIDIA's driver is loaded, the second under Windows; the third where AMD's is.
_DRIVERS, _AMD = ("/dev/nvidiactl", "/dev/dxg"), "/dev/kfd"
#: Bits of the reasons for a lower clock, nvmlClocksEventReason… in nvml.h, that are no choice and no idleness.
_THROTTLES = {0x08: "hardware slowdown", 0x20: "heat (driver)", 0x40: "heat (hardware)", 0x80: "power brake"}
#: Constants of nvml.h. NVML_P2P_CAPS_INDEX_READ of pynvml is a tuple by mistake, so that it could not be passed.
_P2P_READ = 0
_P2P = {1: "chipset", 2: "model of GPU", 3: "topology", 4: "registry key of the driver", 5: "not supported"}
_RECOVERY_FIELD = 230
_RECOVERY = {1: "reset", 2: "reboot", 3: "drain", 4: "drain and reset"}
_SLOWDOWN = 1
_REMOTES = {0: "gpu", 1: "cpu", 2: "switch"}


def gpus(order: Order) -> dict[str, Any]:
    """Return the driver, and what each GPU tells that a process may use here; ``why`` there are none.

    Raises:
        ModuleNotFoundError: there is a driver, and nothing here to ask it with.
    """
    none: dict[str, Any] = {"driver": None, "cuda": None, "visible": None, "installed": 0}
    none |= {"gpus": [], "no_peers": [], "is_amd": Path(_AMD).exists()}
    if not any(Path(device).exists() for device in _DRIVERS):
        return {**none, "why": f"there is no NVIDIA driver (no {_DRIVERS[0]})"}
    nvml = _library()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {**none, "why": f"the NVIDIA driver does not answer: {error}"}
    return {**none, **_told(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))}


def _library() -> ModuleType:
    try:
        return import_module("pynvml")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "neither here nor where allranks was called is there nvidia-ml-py: pip install 'allranks[gpu]' there"
        ) from None


def _told(nvml: ModuleType, listed: str | None) -> dict[str, Any]:
    from concurrent.futures import ThreadPoolExecutor  # Ten milliseconds, which a node without GPUs can do without.

    devices = installed(nvml)
    usable = visible(devices, listed)
    with ThreadPoolExecutor(max(1, len(usable))) as pool:  # Some answers take milliseconds.
        told = list(pool.map(lambda device: _gpu(nvml, device), usable))
    return {
        "driver": ask(nvml, "nvmlSystemGetDriverVersion"),
        "cuda": _cuda(nvml),
        "installed": len(devices),
        "visible": listed,
        "why": "" if usable else _why_none(devices, listed),
        "gpus": told,
        "no_peers": list(_no_peers(nvml, usable)),
    }


def _why_none(devices: Sequence[Device], listed: str | None) -> str:
    if listed is not None:
        return f"CUDA_VISIBLE_DEVICES is {listed!r}, which shows none of {len(devices)}"
    return "the GPUs are divided (MIG), into no parts yet" if devices else "the NVIDIA driver knows of no GPU"


def _cuda(nvml: ModuleType) -> str | None:
    """Return the version of CUDA that the driver's libcuda has: that of a compatibility package where one is used."""
    number = ask(nvml, "nvmlSystemGetCudaDriverVersion_v2") or ask(nvml, "nvmlSystemGetCudaDriverVersion")
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _gpu(nvml: ModuleType, device: Device) -> dict[str, Any]:
    """Return what one tells; ``error``, if it does not answer."""
    known = {"index": device.index, "part": device.part, "uuid": device.uuid, "error": device.error}
    if device.error:
        return known
    try:
        return {**known, **_of_itself(nvml, device), **_of_the_card(nvml, device.handle)}
    except nvml.NVMLError as error:
        return {**known, "error": str(error)}


def _of_itself(nvml: ModuleType, device: Device) -> dict[str, Any]:
    """Return what differs between the parts of a GPU."""
    handle = device.handle if device.part is None else device.part_handle
    memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    return {
        "name": ask(nvml, "nvmlDeviceGetName", handle),
        "memory": {"total": memory.total, "free": memory.free} if memory else None,
        "processes": _processes(nvml, handle),
    }


def _of_the_card(nvml: ModuleType, handle: Any) -> dict[str, Any]:
    capability = ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    temperature = ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
    return {
        "capability": "{}.{}".format(*capability) if capability else None,
        "ecc": _ecc(nvml, handle),
        "remapped": _remapped(nvml, handle),
        "recovery": _recovery(nvml, handle),
        "throttled": _throttled(nvml, handle),
        "temperature": temperature,
        "margin": _margin(nvml, handle, temperature),
        "persistence": ask(nvml, "nvmlDeviceGetPersistenceMode", handle),
        "pcie": {
            "width": ask(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
            "max_width": ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
            "generation": ask(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
            "max_generation": ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        },
        "nvlinks": _nvlinks(nvml, handle),
    }


def _processes(nvml: ModuleType, handle: Any) -> list[dict[str, Any]]:
    """Return who holds memory. In a container these are numbers of the host's, or none at all."""
    kinds = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
    found = {process.pid: process.usedGpuMemory for kind in kinds for process in ask(nvml, kind, handle) or ()}
    return [{"pid": pid, "used": used, **_owner(pid)} for pid, used in sorted(found.items())]


def _owner(pid: int) -> dict[str, Any]:
    """Return name and user of a process; None where this may not be read."""
    try:
        process = Path("/proc", str(pid))
        user, name = process.stat().st_uid, (process / "comm").read_text().strip()
    except OSError:
        return {"name": None, "user": None, "is_ours": False}
    try:
        return {"name": name, "user": pwd.getpwuid(user).pw_name, "is_ours": user == os.getuid()}
    except KeyError:
        return {"name": name, "user": str(user), "is_ours": user == os.getuid()}


def _ecc(nvml: ModuleType, handle: Any) -> dict[str, Any]:
    """Return whether memory is checked, and the errors not corrected: since the driver was loaded, and ever."""
    mode = ask(nvml, "nvmlDeviceGetEccMode", handle)
    since, ever = (
        ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)
        for counter in (nvml.NVML_VOLATILE_ECC, nvml.NVML_AGGREGATE_ECC)
    )
    return {"enabled": bool(mode[0]) if mode else None, "uncorrected": since, "uncorrected_ever": ever}


def _remapped(nvml: ModuleType, handle: Any) -> dict[str, Any] | None:
    rows = ask(nvml, "nvmlDeviceGetRemappedRows", handle)
    if rows is None:
        return None
    return {"correctable": rows[0], "uncorrectable": rows[1], "pending": bool(rows[2]), "failure": bool(rows[3])}


def _recovery(nvml: ModuleType, handle: Any) -> str | None:
    """Return what the driver wants to be done before the GPU is used again; None: nothing, or it does not tell."""
    values = ask(nvml, "nvmlDeviceGetFieldValues", handle, [_RECOVERY_FIELD])
    if not values or values[0].nvmlReturn:
        return None
    action = values[0].value.uiVal
    return _RECOVERY.get(action, f"recovery action {action}") if action else None


def _throttled(nvml: ModuleType, handle: Any) -> list[str] | None:
    names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    bits = next((found for name in names if (found := ask(nvml, name, handle)) is not None), None)
    return None if bits is None else [reason for bit, reason in _THROTTLES.items() if bits & bit]


def _margin(nvml: ModuleType, handle: Any, temperature: int | None) -> int | None:
    """Return how many degrees are left until it slows down: newer ones tell it so, older ones where that is."""
    margin: int | None = ask(nvml, "nvmlDeviceGetMarginTemperature", handle)
    if margin is None and temperature is not None:
        slowdown = ask(nvml, "nvmlDeviceGetTemperatureThreshold", handle, _SLOWDOWN)
        margin = slowdown - temperature if slowdown else None
    return margin


def _nvlinks(nvml: ModuleType, handle: Any) -> list[str]:
    """Return for each link what is at its other end, ``inactive``, or ``active`` if that is not told."""
    links = []
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = ask(nvml, "nvmlDeviceGetNvLinkState", handle, number)
        if state is None:
            break
        remote = ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number) if state else None
        links.append("inactive" if not state else "active" if remote is None else _REMOTES.get(remote, "active"))
    return links


def _no_peers(nvml: ModuleType, devices: Sequence[Device]) -> Iterator[list[Any]]:
    """Yield the pairs of whole GPUs that cannot read each other's memory, with the reason."""
    whole = [device for device in devices if device.part is None and not device.error]
    for one, other in combinations(whole, 2):
        try:
            status = ask(nvml, "nvmlDeviceGetP2PStatus", one.handle, other.handle, _P2P_READ)
        except nvml.NVMLError:
            continue  # It is lost since: the next look says so.
        if status:
            yield [one.index, other.index, _P2P.get(status, "unknown")]
