"""Checks that a GPU computes correct results, and measures its speed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: The first major version of compute capability with bf16.
_HAS_BF16 = 8
#: Rows of the matrices: enough to keep a GPU busy, and little of its memory (200 MB).
_SIZE, _SIZE_OF_CPU = 4096, 256
#: Seconds of computing, to reach the clock of long work; the result is checked before and after.
_SECONDS, _AT_ONCE = 0.25, 8
#: Number of terms of each sum that do not cancel out.
_LEFT = 4


def measure(device: torch.device) -> dict[str, Any]:
    """Multiply matrices on a device, and compare the result with the exact product.

    Returns:
        ``index`` of the device, its ``name``, its ``capability`` and the architectures that torch was built for; None
        for a CPU. For each precision that it can compute in: ``wrong`` of ``values`` of the product are wrong, and
        ``tflops``: 10^12 operations a second; or ``error``: why it could not.
    """
    found = {"index": device.index, **_build(device)}
    return {**found, **{name: _tried(device, _PRECISIONS[name]) for name in precisions(found)}}


def precisions(build: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the precisions that a device supports, by its compute capability and torch's build.

    GPUs before compute capability 8.0 have no native bf16, and the oldest reject it.
    """
    capability = build["capability"]
    if not capability:
        return (*_PRECISIONS,)
    if not is_built_for(capability, build["arches"]):
        return ()
    return (*_PRECISIONS,) if int(capability.split(".")[0]) >= _HAS_BF16 else ("fp32",)


def is_built_for(capability: str, arches: Sequence[str]) -> bool:
    """Return True if code for one of these architectures runs on a GPU of this compute capability.

    Binary code (``sm_80``) runs on the same major version, from its minor version on; PTX (``compute_80``) from its
    version on; architectures with an ``a`` only on exactly that version.
    """
    has = tuple(map(int, capability.split(".")))
    for arch in arches:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if not match:
            continue
        kind, needs, special = match[1], (int(match[2]), int(match[3])), match[4]
        is_near = has == needs if special == "a" else has >= needs
        if is_near and ((kind == "compute" and not special) or has[0] == needs[0]):
            return True
    return False


def _build(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": device.type, "capability": None, "arches": None}
    capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    if torch.version.hip:  # AMD's architectures have other names.
        capability = ""
    return {"name": torch.cuda.get_device_name(device), "capability": capability, "arches": torch.cuda.get_arch_list()}


def _matrices(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two matrices of small integers whose product is exact in any order of summation, and that product.

    The matrices are outer products: ``left[i, k] = u[i] s[k]`` and ``right[k, j] = s[k] w[k] v[j]``, where s is 1 or
    -1, and w alternates between 1 and -1 except for the last terms, which remain: no sum of neighbours exceeds their
    number times 9, which bf16 holds exactly.
    """
    generator = torch.Generator().manual_seed(1)
    u, v = (torch.tensor([-3.0, -2, -1, 1, 2, 3])[torch.randint(6, (size,), generator=generator)] for _ in range(2))
    s = torch.tensor([-1.0, 1])[torch.randint(2, (size,), generator=generator)]
    w = 1.0 - 2.0 * (torch.arange(size) % 2)
    w[-_LEFT:] = 1.0
    return torch.outer(u, s), torch.outer(s * w, v), _LEFT * torch.outer(u, v)


def _tried(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    size = _SIZE if device.type == "cuda" else _SIZE_OF_CPU
    try:
        left, right, expected = _matrices(size)
        left, right = left.to(device, dtype), right.to(device, dtype)
        cold = _count_wrong(left @ right, expected)
        rate = _rate(lambda: left @ right, device)
        wrong = max(cold, _count_wrong(left @ right, expected))
    except RuntimeError as error:  # CUDA errors and out-of-memory errors are of this class.
        return {"error": str(error).splitlines()[0]}
    return {"wrong": wrong, "values": size * size, "tflops": rate * 2 * size**3 / 1e12}


def _count_wrong(product: torch.Tensor, expected: torch.Tensor) -> int:
    """Count the wrong values on the CPU, which is not under test."""
    return int((product.float().cpu() != expected).sum())


def _rate(work: Callable[[], object], device: torch.device) -> float:
    """Return how often per second a device completes ``work``."""
    done, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < _SECONDS:
        for _ in range(_AT_ONCE):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done += _AT_ONCE
    return done / passed
