"""Chooses backend and device of a rank, and checks that they exist."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from allranks import contract
from allranks.errors import DeviceError, unknown

if TYPE_CHECKING:
    import torch

    from allranks.runtime.environment import RankEnvironment


def choose(backend: str | None, device: str | None, env: RankEnvironment) -> tuple[str, torch.device]:
    """Choose the process-group backend and the device.

    The backend is the argument, else ALLRANKS_BACKEND, else nccl if torch finds a GPU, else gloo. The device follows
    the backend: ``cuda:LOCAL_RANK`` with nccl, the CPU with gloo, even if there are GPUs. The argument ``device``
    overrides that and the variable: ``"cpu"`` implies gloo, ``"cuda"`` means ``cuda:LOCAL_RANK``.
    """
    import torch
    from torch import distributed

    try:
        wanted = torch.device(device) if device else None
    except RuntimeError:
        raise DeviceError(
            f"invalid device: {device!r}",
            why="expected 'cpu', 'cuda' (the GPU numbered by the local rank) or a GPU by its number, such as 'cuda:1'",
            fix="device='cuda', or leave it out: ranks then use GPUs where there are some",
        ) from None
    may_be_gpu = wanted is None or wanted.type == "cuda"
    if backend is None and may_be_gpu:
        backend = os.environ.get(contract.BACKEND) or None
    if backend is None:
        backend = "nccl" if may_be_gpu and torch.cuda.is_available() and distributed.is_nccl_available() else "gloo"
    # Also in the form cpu:gloo,cuda:nccl; a package may have added its own.
    known = distributed.Backend.backend_list
    if any(part.rpartition(":")[2] not in known for part in backend.lower().split(",")):
        raise unknown("backend", backend, [name for name in known if name != distributed.Backend.UNDEFINED])
    if wanted is None:
        wanted = torch.device("cuda" if "nccl" in backend else "cpu")
    if "nccl" in backend and wanted.type != "cuda":
        raise DeviceError(
            f"backend {backend} cannot work on device {wanted}",
            why="NCCL moves data between GPUs only",
            fix='take backend="gloo", or leave the device out',
        )
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", env.local_rank)
    return backend, wanted


def bind(device: torch.device, env: RankEnvironment) -> None:
    """Make ``device`` the current one, if it is a GPU."""
    import torch

    if device.type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        raise no_gpu(env, index, count, torch.version.cuda is not None or torch.version.hip is not None)
    torch.cuda.set_device(device)


#: Of GPUs that are not there.
_ON_CPU = "train on the CPU: --backend gloo, and no device='cuda' in the script"


def no_gpu(env: RankEnvironment, index: int, count: int, built_with_cuda: bool) -> DeviceError:
    """Return the error for a rank whose GPU does not exist."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "is not set" if visible is None else f"is {visible!r}"
    what = (
        f"rank {env.rank} (local rank {env.local_rank}) on {socket.gethostname()} needs GPU {index}, "
        f"but there {'is' if count == 1 else 'are'} {count or 'none'}"
    )
    if not built_with_cuda:
        why = "this torch was built without CUDA"
        fix = f"install a torch with CUDA, or {_ON_CPU}"
    else:
        s = "" if count == 1 else "s"
        why = f"torch sees {count} GPU{s}; CUDA_VISIBLE_DEVICES {shown}"
        fix = (
            f"start at most {count} rank{s} per node (--nproc-per-node {count}), or let each rank see all GPUs"
            if count
            else f"run on a node with GPUs, or {_ON_CPU}"
        )
    return DeviceError(what, why=why, fix=fix)


def gpu_identity(device: torch.device) -> str | None:
    """Return what identifies a GPU of a host, however its GPUs are numbered; None for a CPU."""
    import torch

    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)  # Older versions of torch do not have it.
    return str(uuid) if uuid else f"{properties.name} {physical_number(device.index or 0, os.environ)}"


def physical_number(index: int, variables: Mapping[str, str]) -> str:
    """Translate a GPU's number in this process into the number by which other processes know it.

    CUDA_VISIBLE_DEVICES lists numbers or UUIDs, and the process numbers that list. AMD's variables narrow the list down
    further, so they are added as they are.
    """
    entries = variables.get("CUDA_VISIBLE_DEVICES", "").split(",")
    entry = entries[index].strip() if index < len(entries) else ""
    amd = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    narrowed = [f"{name}={variables[name]} index {index}" for name in amd if variables.get(name)]
    return " ".join([f"number {entry or index}", *narrowed])
