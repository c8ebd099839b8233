"""Reproducibility: seeds, the states of random generators, and deterministic algorithms."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib import util
from typing import TYPE_CHECKING, Any

from allranks.runtime import log

if TYPE_CHECKING:
    import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
#: One of the two values that make cuBLAS reproducible (NVIDIA cuBLAS, "Results Reproducibility").
_CUBLAS_VALUE = ":4096:8"

_LIMITS = (
    "with the same script, data, seed, number of ranks, hardware and versions, two runs give the same bits; not with "
    "others. Beyond torch's reach: kernels of other packages that use atomics, the order in which NCCL adds up "
    "(set NCCL_ALGO=Ring and NCCL_PROTO=Simple to fix it), and what depends on time"
)


def hashed(text: str) -> int:
    """Return a seed: 63 bits of SHA-256 of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def rank_seed(seed: int, rank: int) -> int:
    """Return the seed of a rank. ``seed + rank`` would give rank 1 of seed 0 the numbers of rank 0 of seed 1."""
    return hashed(f"allranks/{seed}/{rank}")


def seed_all(seed: int, rank: int) -> int:
    """Seed Python, NumPy (if installed) and torch on the CPU and all GPUs; return the rank's seed."""
    import torch

    value = rank_seed(seed, rank)
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules or util.find_spec("numpy"):
        import numpy

        numpy.random.seed(value % 2**32)
    return value


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's (if loaded) and torch's generators, as plain values and CPU tensors."""
    import torch

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        state["numpy"] = [str(kind), keys.tobytes(), int(position), int(has_gauss), float(gauss)]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random(state: dict[str, Any], device: torch.device) -> None:
    """Restore the result of :func:`random_states`; skip generators that this process does not have."""
    import torch

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def make_deterministic(*, report: bool, seeded: bool) -> Callable[[], None]:
    """Make torch use deterministic algorithms only; return a function that restores the settings.

    An operation without one raises torch's RuntimeError, which names it. With ``report``, this rank prints what is not
    guaranteed, including that the generators were not ``seeded``.
    """
    import torch
    from torch.utils import deterministic

    late = torch.cuda.is_initialized() and _CUBLAS not in os.environ  # type: ignore[no-untyped-call]
    undo = ExitStack()
    if _CUBLAS not in os.environ:
        os.environ[_CUBLAS] = _CUBLAS_VALUE
        undo.callback(os.environ.pop, _CUBLAS, None)
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    undo.callback(torch.use_deterministic_algorithms, before, warn_only=warn_only)
    torch.use_deterministic_algorithms(True)
    for owner, name, value in (
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn, "benchmark", False),
        (deterministic, "fill_uninitialized_memory", True),
    ):
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
    if report:
        log(f"deterministic: {_LIMITS}")
        if late:
            log(f"warning: CUDA was in use before init(); set {_CUBLAS}={_CUBLAS_VALUE} in the job's environment")
        if not seeded:
            log("warning: seed=None leaves the generators alone, so that the numbers differ in each run")
        if os.environ.get("PYTHONHASHSEED", "random") == "random":
            log("deterministic: PYTHONHASHSEED is not set: the order of a set of texts differs in each run")
    return undo.close
