"""Tensors of a checkpoint, read from the pieces in which they were written, and given to all ranks."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from allranks.errors import RankError
from allranks.runs.checkpoints import Chunk, TensorEntry
from allranks.runtime.checkpoint.layout import box

if TYPE_CHECKING:
    from allranks.runtime.control import Control

#: Tensors up to so many bytes travel together.
_SMALL = 1 << 20
_TOGETHER = 64 << 20


def read_box(folder: Path, entry: TensorEntry, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Read a box of a tensor.

    Args:
        folder: of the checkpoint.
        entry: where the tensor's pieces are.
        start: index of the box's first element.
        shape: of the box.

    Raises:
        RankError: the pieces do not cover it.
    """
    out = torch.empty(tuple(shape), dtype=getattr(torch, entry.dtype))
    missing = out.numel()
    for chunk in entry.chunks:
        low = [max(ours, theirs) for ours, theirs in zip(start, chunk.start, strict=True)]
        ends = zip(start, shape, chunk.start, chunk.shape, strict=True)
        high = [min(ours + size, theirs + extent) for ours, size, theirs, extent in ends]
        if all(first < last for first, last in zip(low, high, strict=True)):
            missing -= _read_overlap(folder, chunk, low, high, out, start)
    if missing > 0:
        raise RankError(f"{folder} does not hold all of a tensor", why="the file of a rank is missing")
    return out


def read_whole(folder: Path, entry: TensorEntry) -> Tensor:
    """Read a tensor."""
    return read_box(folder, entry, (0,) * len(entry.shape), entry.shape)


def _read_overlap(
    folder: Path, chunk: Chunk, low: list[int], high: list[int], out: Tensor, start: Sequence[int]
) -> int:
    """Read what lies between ``low`` and ``high`` from a chunk into ``out``; return the number of elements."""
    target = out[tuple(slice(a - at, b - at) for a, b, at in zip(low, high, start, strict=True))]
    rows = (low[0] - chunk.start[0], high[0] - chunk.start[0]) if low else (0, 1)
    row = math.prod(chunk.shape[1:])
    direct = target.is_contiguous() and target.numel() == (rows[1] - rows[0]) * row
    block = target if direct else torch.empty(((rows[1] - rows[0]), *chunk.shape[1:]), dtype=out.dtype)
    with (folder / chunk.file).open("rb", buffering=0) as stream:
        stream.seek(chunk.offset + rows[0] * row * out.element_size())
        _fill(stream, block)
    if not direct:
        inner = [slice(a - at, b - at) for a, b, at in zip(low[1:], high[1:], chunk.start[1:], strict=True)]
        target.copy_(block[(slice(None), *inner)])
    return target.numel()


def _fill(stream: Any, tensor: Tensor) -> None:
    size = tensor.numel() * tensor.element_size()
    view, done = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B"), 0
    while done < size:
        count = stream.readinto(view[done:])
        if not count:
            raise RankError(f"{stream.name} ends too early", why="it was changed while it was read")
        done += count


def read_all(
    folder: Path, names: Iterable[str], entries: Mapping[str, TensorEntry], like: Mapping[str, Any], control: Control
) -> dict[str, Tensor]:
    """Give tensors to all ranks; all of them call it alike.

    Args:
        folder: of the checkpoint. Rank 0 reads what all ranks need; what is sharded, each rank reads by itself.
        names: of the tensors.
        entries: where they are.
        like: for those that are to be sharded, a DTensor that shows how.
        control: of the context.
    """
    found: dict[str, Tensor] = {}
    small: list[str] = []
    waiting = 0
    for name in names:
        entry = entries[name]
        if name in like:
            found[name] = _read_sharded(folder, entry, like[name])
            continue
        size = math.prod(entry.shape) * entry.itemsize
        if control.group is not None and size <= _SMALL:
            small.append(name)
            waiting += size
            if waiting > _TOGETHER:
                found.update(_broadcast_small(folder, small, entries, control))
                small, waiting = [], 0
        else:
            found[name] = _broadcast(folder, entry, control)
    return {**found, **_broadcast_small(folder, small, entries, control)} if small else found


def _broadcast(folder: Path, entry: TensorEntry, control: Control) -> Tensor:
    if control.group is None:
        return read_whole(folder, entry)
    first = distributed.get_rank() == 0
    tensor = read_whole(folder, entry) if first else torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    distributed.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=control.group)
    return tensor


def _broadcast_small(
    folder: Path, names: list[str], entries: Mapping[str, TensorEntry], control: Control
) -> dict[str, Tensor]:
    first = distributed.get_rank() == 0
    return control.broadcast({name: read_whole(folder, entries[name]) for name in names} if first else {})


def _read_sharded(folder: Path, entry: TensorEntry, like: Any) -> Tensor:
    """Read this rank's box, and make a DTensor of it that is spread as ``like`` is."""
    shape, start = box(like)
    local = read_box(folder, entry, start, shape).to(like.device)
    made: Tensor = type(like.detach()).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made
