"""Random numbers: reproducible, and different on each rank."""

from __future__ import annotations

import hashlib
import random
import sys
from importlib import util


def rank_seed(seed: int, rank: int) -> int:
    """Give the seed of a rank: 63 bits of SHA-256 of seed and rank.

    ``seed + rank`` would give rank 1 of seed 0 the numbers of rank 0 of seed 1.
    """
    digest = hashlib.sha256(f"allranks/{seed}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


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
