"""Files as MNIST's, of given images or of a few random ones; without torch, which tests of clusters do not import."""

from __future__ import annotations

import gzip
import math
import random
import struct
from pathlib import Path


def idx(values: bytes, *shape: int) -> bytes:
    """Return bytes of a shape in the IDX format."""
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + values


def random_idx(*shape: int, high: int) -> bytes:
    """Return random bytes below ``high`` in the IDX format, always the same."""
    return idx(bytes(random.Random(1).choices(range(high), k=math.prod(shape))), *shape)


def write_mnist(folder: Path, joint: str = "-", packed: bool = False) -> None:
    """Write 32 random images to train on and 10 to evaluate with, of 28x28 pixels."""
    for part, samples in (("train", 32), ("t10k", 10)):
        for name, data in (
            (f"{part}-images{joint}idx3-ubyte", random_idx(samples, 28, 28, high=256)),
            (f"{part}-labels{joint}idx1-ubyte", random_idx(samples, high=10)),
        ):
            path = folder / (name + ".gz" if packed else name)
            path.write_bytes(gzip.compress(data) if packed else data)
