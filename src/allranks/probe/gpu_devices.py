"""Which GPUs of a machine a process may use, as CUDA decides: all, or those that CUDA_VISIBLE_DEVICES names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Device:
    """A GPU, or a part of one that was divided (MIG).

    Attributes:
        index: the GPU's number, as nvidia-smi shows it.
        uuid: what names it, a part by its own; empty where it does not answer.
        handle: what NVML calls the GPU.
        error: why it does not answer.
        part: the number of the part; None: it is the whole GPU.
        part_handle: what NVML calls the part.
        parts: the parts that it is divided into; None: it is not divided.
    """

    index: int
    uuid: str = ""
    handle: Any = None
    error: str = ""
    part: int | None = None
    part_handle: Any = None
    parts: tuple[Device, ...] | None = field(default=None, repr=False)


def ask(nvml: ModuleType, name: str, *arguments: Any) -> Any:
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


def installed(nvml: ModuleType) -> list[Device]:
    """Return the GPUs of this machine in the order of their addresses, one that does not answer with the reason."""
    return [_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def visible(devices: Sequence[Device], listed: str | None) -> list[Device]:
    """Return those that a process may use, in the order in which CUDA counts them.

    Where GPUs differ CUDA counts the fastest ones first, unless CUDA_DEVICE_ORDER says otherwise: then numbers may
    name others than here.

    Args:
        devices: all there are.
        listed: CUDA_VISIBLE_DEVICES; None: it is not set. The first entry that names nothing hides those after it.
    """
    chosen = list(devices) if listed is None else list(_listed(devices, listed))
    usable = [part for device in chosen for part in ([device] if device.parts is None else device.parts[:1])]
    # "CUDA can only enumerate a single compute instance", and then no whole GPU (NVIDIA's MIG User Guide).
    parts = [device for device in usable if device.part is not None]
    return parts[:1] or usable


def _device(nvml: ModuleType, index: int) -> Device:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = ask(nvml, "nvmlDeviceGetUUID", handle) or ""
        return Device(index, uuid, handle, parts=_parts(nvml, index, handle))
    except nvml.NVMLError as error:
        return Device(index, error=str(error))


def _parts(nvml: ModuleType, index: int, handle: Any) -> tuple[Device, ...] | None:
    mode = ask(nvml, "nvmlDeviceGetMigMode", handle)
    if not mode or not mode[0]:
        return None
    parts = []
    for number in range(ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        if part is not None:
            uuid = ask(nvml, "nvmlDeviceGetUUID", part) or ""
            parts.append(Device(index, uuid, handle, part=number, part_handle=part))
    return tuple(parts)


def _listed(devices: Sequence[Device], listed: str) -> Iterator[Device]:
    for entry in (entry.strip() for entry in listed.split(",")):
        named = _named(devices, entry)
        if named is None:
            return
        yield named


def _named(devices: Sequence[Device], entry: str) -> Device | None:
    """Find the one that is meant by a number, or by the beginning of a UUID."""
    if entry.isdecimal():
        return devices[int(entry)] if int(entry) < len(devices) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    everything = [part for device in devices for part in (device, *(device.parts or ()))]
    found = [device for device in everything if device.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None
