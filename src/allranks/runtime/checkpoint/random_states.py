"""The states of a rank's random generators: Python, NumPy where it is loaded, torch on the CPU and on its GPU."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

from allranks.runtime.seed import seed_all


def capture(device: torch.device) -> dict[str, Any]:
    """Give the states as plain values and tensors on the CPU."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        state["numpy"] = [str(kind), keys.tobytes(), int(position), int(has_gauss), float(gauss)]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Take over what :func:`capture` gave; what this process does not have is left out."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def reseed(seed: int, rank: int, step: int) -> None:
    """Seed anew where there is no state to go on from: a number that depends on seed, rank and step alone."""
    digest = hashlib.sha256(f"allranks/{seed}/continued/{step}".encode()).digest()
    seed_all(int.from_bytes(digest[:8], "big") >> 1, rank)
