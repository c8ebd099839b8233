"""Handwritten digits: those that come with scikit-learn, or the MNIST files in a directory."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

HELD_OUT = 360  # of scikit-learn's 1797 digits


def load(folder: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Give training and held-out set: images (N, 1, height, width) from 0 to 1, and labels (N)."""
    return load_digits() if folder is None else load_mnist(folder)


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Load real scans of 8x8 pixels, which need no download, and always hold the same ones out."""
    try:
        from sklearn import datasets
    except ImportError:
        raise SystemExit(
            "error: scikit-learn, which holds the default data, is not installed\n"
            "  fix: pip install scikit-learn, or give a directory with the MNIST files: --data-dir DIR"
        ) from None
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, training = order[:HELD_OUT], order[HELD_OUT:]
    return (
        TensorDataset(images[training], labels[training]),
        TensorDataset(images[held_out], labels[held_out]),
    )


def load_mnist(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """Load MNIST's four files, gzipped or not."""
    if not folder.is_dir():
        raise SystemExit(f"error: there is no directory {folder}\n  fix: --data-dir DIR, or leave it out")
    sets = []
    for part in ("train", "t10k"):
        images = read_idx(find(folder, f"{part}-images", "idx3-ubyte"))
        labels = read_idx(find(folder, f"{part}-labels", "idx1-ubyte"))
        if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
            raise SystemExit(
                f"error: {folder}: the {part} files hold images of shape {tuple(images.shape)} "
                f"and labels of shape {tuple(labels.shape)}\n  fix: download the files again"
            )
        sets.append(TensorDataset(images.unsqueeze(1).float().div(255), labels.long()))
    return sets[0], sets[1]


def find(folder: Path, stem: str, kind: str) -> Path:
    """Find a file under any of its usual names."""
    names = [f"{stem}{joint}{kind}{end}" for joint in "-." for end in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise SystemExit(
        f"error: {folder} has no file {names[0]}\n"
        f"  why: --data-dir needs MNIST's four files; {', '.join(names[1:])} would be read too\n"
        "  fix: put the file there, or leave --data-dir out to train on scikit-learn's digits"
    )


def read_idx(path: Path) -> torch.Tensor:
    """Read a file of the IDX format: 0, 0, type, dimensions; each size; the bytes, last dimension fastest."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, dimensions = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{dimensions}I", data, 4) if zeros == 0 and kind == 8 else ()
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise SystemExit(f"error: cannot read {path}\n  why: {error}\n  fix: download it again") from error
    start, size = 4 + 4 * dimensions, math.prod(shape)
    if not shape:
        raise SystemExit(f"error: {path} is no IDX file of bytes\n  why: it starts with {data[:4].hex(' ')}")
    if len(data) != start + size or not size:
        raise SystemExit(
            f"error: {path} is corrupt\n  why: its header promises {start + size} bytes, it has {len(data)}\n"
            "  fix: download it again"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).reshape(shape)
