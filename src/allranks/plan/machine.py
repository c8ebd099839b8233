"""What this machine has, told without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allranks.probe.cgroups import usable_cpus


@dataclass(frozen=True)
class Machine:
    """CPUs and GPUs that a process started here may use, and how the number of GPUs was found out."""

    cpus: int
    gpus: int
    gpus_from: str


def this_machine(environ: Mapping[str, str]) -> Machine:
    """Look at this machine, within the limits of this process (affinity, container, visible devices)."""
    gpus, found = _gpus(environ)
    return Machine(cpus=usable_cpus(), gpus=gpus, gpus_from=found)


def _gpus(environ: Mapping[str, str]) -> tuple[int, str]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len(_visible_devices(visible)), f"CUDA_VISIBLE_DEVICES={visible}"
    count = _installed_gpus()
    return count, f"{count} on this machine" if count else "no GPU on this machine"


def _visible_devices(text: str) -> list[str]:
    """Return the devices in CUDA_VISIBLE_DEVICES; as in CUDA, an invalid one hides those after it."""
    devices: list[str] = []
    for device in filter(None, (part.strip() for part in text.split(","))):
        if device.startswith("-"):
            break
        devices.append(device)
    return devices


def _installed_gpus() -> int:
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):
        return 0
    try:
        import pynvml
    except ImportError:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
