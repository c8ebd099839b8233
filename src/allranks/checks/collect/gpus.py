"""What a machine's GPUs report of themselves through NVIDIA's management library (NVML). No context is made on them."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from allranks.checks.collect.gather import ProbeRequest

#: The first exists where NVIDIA's driver is loaded, the second under Windows; the third where AMD's is.
_DRIVERS, _AMD = ("/dev/nvidiactl", "/dev/dxg"), "/dev/kfd"
#: Bits of the reasons for a lower clock, nvmlClocksEventReason… in nvml.h, that are no choice and no idleness.
_THROTTLES = {0x08: "hardware slowdown", 0x20: "heat (driver)", 0x40: "heat (hardware)", 0x80: "power brake"}
#: Constants of nvml.h. NVML_P2P_CAPS_INDEX_READ of pynvml is a tuple by mistake, so that it could not be passed.
_P2P_READ = 0
_P2P = {1: "chipset", 2: "model of GPU", 3: "topology", 4: "registry key of the driver", 5: "not supported"}
_RECOVERY_FIELD = 230
_RECOVERY = {1: "reset", 2: "reboot", 3: "drain", 4: "drain and reset"}
_REMOTES = {0: "gpu", 1: "cpu", 2: "switch"}


def gpus(request: ProbeRequest) -> dict[str, Any]:
    """Return the driver, and what each GPU reports that a process may use here; ``why`` there are none.

    Raises:
        ModuleNotFoundError: there is a driver, and no library to query it with.
    """
    none: dict[str, Any] = {"driver": None, "cuda": None, "visible": None, "installed": 0}
    none |= {"gpus": [], "no_peers": [], "is_amd": Path(_AMD).exists()}
    if not any(Path(device).exists() for device in _DRIVERS):
        return {**none, "why": f"there is no NVIDIA driver (no {_DRIVERS[0]})"}
    try:
        nvml = import_module("pynvml")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "neither here nor where allranks was called is there nvidia-ml-py: pip install 'allranks[gpu]' there"
        ) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {**none, "why": f"the NVIDIA driver does not answer: {error}"}
    return {**none, **_query_all(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))}


def _query_all(nvml: ModuleType, listed: str | None) -> dict[str, Any]:
    from concurrent.futures import ThreadPoolExecutor  # 10 ms, which a node without GPUs saves.

    devices = [_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    usable = _visible(devices, listed)
    why = ""
    if not usable and listed is not None:
        why = f"CUDA_VISIBLE_DEVICES is {listed!r}, which shows none of {len(devices)}"
    elif not usable:
        why = "the GPUs are divided (MIG), into no parts yet" if devices else "the NVIDIA driver knows of no GPU"
    with ThreadPoolExecutor(max(1, len(usable))) as pool:  # Some queries take milliseconds.
        found = list(pool.map(lambda device: _gpu(nvml, device), usable))
    # Of the driver's libcuda: that of a compatibility package where one is used.
    cuda = _query(nvml, "nvmlSystemGetCudaDriverVersion_v2") or _query(nvml, "nvmlSystemGetCudaDriverVersion")
    return {
        "driver": _query(nvml, "nvmlSystemGetDriverVersion"),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "installed": len(devices),
        "visible": listed,
        "why": why,
        "gpus": found,
        "no_peers": list(_no_peers(nvml, usable)),
    }


def _query(nvml: ModuleType, name: str, *arguments: Any) -> Any:
    """Call a function of NVML; None where the GPU, the driver or ``nvml`` has no answer.

    Raises:
        NVMLError: the GPU is lost, or works no more before it is reset.
    """
    function = getattr(nvml, name, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
            raise
        return None


# --- which GPUs a process may use, as CUDA decides: all, or those that CUDA_VISIBLE_DEVICES names ---


class Device(NamedTuple):
    """A GPU, or a part of one that was divided (MIG)."""

    number: int  # The GPU's number, as nvidia-smi shows it.
    uuid: str = ""  # Of a part its own; empty where it does not answer.
    handle: Any = None  # NVML's handle of the GPU.
    error: str = ""  # Why it does not answer.
    part: int | None = None  # The number of the part; None: it is the whole GPU.
    part_handle: Any = None  # NVML's handle of the part.
    parts: tuple[Device, ...] | None = None  # None: it is not divided.


def _device(nvml: ModuleType, index: int) -> Device:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _query(nvml, "nvmlDeviceGetUUID", handle) or ""
        return Device(index, uuid, handle, parts=_parts(nvml, index, handle))
    except nvml.NVMLError as error:
        return Device(index, error=str(error))


def _parts(nvml: ModuleType, index: int, handle: Any) -> tuple[Device, ...] | None:
    mode = _query(nvml, "nvmlDeviceGetMigMode", handle)
    if not mode or not mode[0]:
        return None
    parts = []
    for number in range(_query(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = _query(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        if part is not None:
            uuid = _query(nvml, "nvmlDeviceGetUUID", part) or ""
            parts.append(Device(index, uuid, handle, part=number, part_handle=part))
    return tuple(parts)


def _visible(devices: Sequence[Device], listed: str | None) -> list[Device]:
    """Return those that a process may use, in the order in which CUDA counts them.

    Where GPUs differ CUDA counts the fastest ones first, unless CUDA_DEVICE_ORDER says otherwise: then numbers may
    name others than here. In ``listed``, CUDA_VISIBLE_DEVICES, the first entry that names nothing hides those after it.
    """
    named = [_named(devices, entry.strip()) for entry in listed.split(",")] if listed is not None else [*devices]
    usable: list[Device] = []
    for device in named:
        if device is None:
            break
        usable += [device] if device.parts is None else device.parts[:1]
    # "CUDA can only enumerate a single compute instance", and then no whole GPU (NVIDIA's MIG User Guide).
    parts = [device for device in usable if device.part is not None]
    return parts[:1] or usable


def _named(devices: Sequence[Device], entry: str) -> Device | None:
    """Find the device that is meant by a number, or by the beginning of a UUID."""
    if entry.isdecimal():
        return devices[int(entry)] if int(entry) < len(devices) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    everything = [part for device in devices for part in (device, *(device.parts or ()))]
    found = [device for device in everything if device.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


# --- what one GPU reports ---


def _gpu(nvml: ModuleType, device: Device) -> dict[str, Any]:
    known = {"index": device.number, "part": device.part, "uuid": device.uuid, "error": device.error}
    if device.error:
        return known
    try:
        return {**known, **_of_itself(nvml, device), **_of_the_card(nvml, device.handle)}
    except nvml.NVMLError as error:
        return {**known, "error": str(error)}


def _of_itself(nvml: ModuleType, device: Device) -> dict[str, Any]:
    """Return what differs between the parts of a GPU."""
    handle = device.handle if device.part is None else device.part_handle
    memory = _query(nvml, "nvmlDeviceGetMemoryInfo", handle)
    # The processes that hold memory. In a container these are ids of the host's, or none at all.
    kinds = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
    held = {process.pid: process.usedGpuMemory for kind in kinds for process in _query(nvml, kind, handle) or ()}
    return {
        "name": _query(nvml, "nvmlDeviceGetName", handle),
        "memory": {"total": memory.total, "free": memory.free} if memory else None,
        "processes": [{"pid": pid, "used": used, **_owner(pid)} for pid, used in sorted(held.items())],
    }


def _owner(pid: int) -> dict[str, Any]:
    """Return name and user of a process; None where this may not be read."""
    try:
        process = Path("/proc", str(pid))
        user, name = process.stat().st_uid, (process / "comm").read_text().strip()
    except OSError:
        return {"name": None, "user": None, "is_ours": False}
    try:
        owner = pwd.getpwuid(user).pw_name
    except KeyError:
        owner = str(user)
    return {"name": name, "user": owner, "is_ours": user == os.getuid()}


def _of_the_card(nvml: ModuleType, handle: Any) -> dict[str, Any]:
    capability = _query(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    # Since the driver was loaded.
    errors = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    rows = _query(nvml, "nvmlDeviceGetRemappedRows", handle)
    return {
        "capability": "{}.{}".format(*capability) if capability else None,
        "ecc": {"uncorrected": _query(nvml, "nvmlDeviceGetTotalEccErrors", handle, *errors)},
        "remapped": {"pending": bool(rows[2]), "failure": bool(rows[3])} if rows else None,
        "recovery": _recovery(nvml, handle),
        "throttled": _throttled(nvml, handle),
        "pcie": {
            "width": _query(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
            "max_width": _query(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
            "generation": _query(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
            "max_generation": _query(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        },
        "nvlinks": _nvlinks(nvml, handle),
    }


def _recovery(nvml: ModuleType, handle: Any) -> str | None:
    """Return what the driver wants to be done before the GPU is used again; None: nothing, or it does not report it."""
    values = _query(nvml, "nvmlDeviceGetFieldValues", handle, [_RECOVERY_FIELD])
    if not values or values[0].nvmlReturn:
        return None
    action = values[0].value.uiVal
    return _RECOVERY.get(action, f"recovery action {action}") if action else None


def _throttled(nvml: ModuleType, handle: Any) -> list[str] | None:
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        bits = _query(nvml, name, handle)
        if bits is not None:
            return [reason for bit, reason in _THROTTLES.items() if bits & bit]
    return None


def _nvlinks(nvml: ModuleType, handle: Any) -> list[str]:
    """Return for each link what is at its other end, ``inactive``, or ``active`` if that is unknown."""
    links = []
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = _query(nvml, "nvmlDeviceGetNvLinkState", handle, number)
        if state is None:
            break
        if state:
            remote: int = _query(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
            links.append(_REMOTES.get(remote, "active"))
        else:
            links.append("inactive")
    return links


def _no_peers(nvml: ModuleType, devices: Sequence[Device]) -> Iterator[list[Any]]:
    """Yield the pairs of whole GPUs that cannot read each other's memory, with the reason."""
    whole = [device for device in devices if device.part is None and not device.error]
    for one, other in combinations(whole, 2):
        try:
            status = _query(nvml, "nvmlDeviceGetP2PStatus", one.handle, other.handle, _P2P_READ)
        except nvml.NVMLError:
            continue  # It is lost since: the next probe says so.
        if status:
            yield [one.number, other.number, _P2P.get(status, "unknown")]
