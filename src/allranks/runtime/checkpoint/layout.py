"""Which rank writes which piece of which tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RankError

#: Alignment of tensors in a data file, in bytes: any dtype can be viewed there.
ALIGNMENT = 64
#: Sharing the writing of less than this for each rank is not worth its files.
LEAST_SHARE = 64 << 20
#: Most ranks that share the writing of what all have.
MOST_WRITERS = 16


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that this rank writes.

    Attributes:
        name: of the tensor.
        dtype: as torch spells it.
        itemsize: bytes of an element.
        whole: shape of the whole tensor.
        start: index of its first element there.
        source: the elements.
        offset: where it begins in the data file, in bytes.
    """

    name: str
    dtype: str
    itemsize: int
    whole: tuple[int, ...]
    start: tuple[int, ...]
    source: Tensor
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in the data file."""
        return self.source.numel() * self.itemsize


@dataclass(frozen=True)
class Layout:
    """What this rank writes.

    Attributes:
        pieces: in the order of the data file.
        size: bytes of the data file.
        aliases: names of tensors that are the same memory as another one, which is written.
    """

    pieces: tuple[Piece, ...]
    size: int
    aliases: dict[str, str]

    def index(self) -> dict[str, Any]:
        """Return the tensors of this file as plain JSON."""
        found: dict[str, Any] = {}
        for piece in self.pieces:
            entry = {"dtype": piece.dtype, "itemsize": piece.itemsize, "shape": piece.whole, "chunks": []}
            found.setdefault(piece.name, entry)["chunks"].append((piece.offset, piece.start, tuple(piece.source.shape)))
        return found


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is spread over ranks: a DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def make_layout(tensors: Mapping[str, Tensor], shared: set[str], rank: int, writers: Sequence[int]) -> Layout:
    """Decide what ``rank`` writes. All ranks decide alike, without a message.

    Args:
        tensors: the state, alike on all ranks but for what is sharded.
        shared: names of those that have equal values on all ranks, so that any rank may write them.
        rank: this one.
        writers: the ranks that share the writing of these.
    """
    unique, aliases = _without_aliases(tensors)
    pieces = [piece for name, tensor in unique.items() if is_sharded(tensor) for piece in _local(name, tensor)]
    whole = {name: tensor for name, tensor in unique.items() if not is_sharded(tensor)}
    if len(writers) < 2:
        shared = set()
    if rank == 0:
        pieces += [_piece(name, tensor) for name, tensor in whole.items() if name not in shared]
    if rank in writers:
        common = [(name, tensor) for name, tensor in whole.items() if name in shared]
        pieces += _share(common, writers.index(rank), len(writers))
    return _placed(pieces, aliases if rank == 0 else {})


def choose_writers(size: int, world_size: int) -> list[int]:
    """Give the ranks that share the writing of ``size`` bytes: spread over the nodes, and not too many."""
    count = max(1, min(world_size, MOST_WRITERS, size // LEAST_SHARE))
    return [number * world_size // count for number in range(count)]


def _placed(pieces: Iterable[Piece], aliases: dict[str, str]) -> Layout:
    placed, end = [], 0
    for piece in pieces:
        placed.append(Piece(**{**vars(piece), "offset": end}))
        end += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(placed), end, aliases)


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Find tensors that are the same memory under several names, such as tied weights."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        key = _identity(tensor)
        if key is not None and key in first:
            aliases[name] = first[key]
        else:
            unique[name] = tensor
            if key is not None:
                first[key] = name
    return unique, aliases


def _identity(tensor: Tensor) -> tuple[Any, ...] | None:
    if is_sharded(tensor) or not tensor.numel():
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _piece(name: str, tensor: Tensor, start: tuple[int, ...] | None = None, whole: torch.Size | None = None) -> Piece:
    shape = tuple(tensor.shape if whole is None else whole)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Piece(name, dtype, tensor.element_size(), shape, start or (0,) * len(shape), tensor)


def _share(tensors: Sequence[tuple[str, Tensor]], share: int, shares: int) -> list[Piece]:
    """Cut the bytes of all tensors, laid end to end, into equal shares, at whole rows of a tensor."""
    total = sum(tensor.nbytes for _, tensor in tensors)
    first, last = total * share // shares, total * (share + 1) // shares
    pieces, at = [], 0
    for name, tensor in tensors:
        rows = tensor.shape[0] if tensor.dim() else 1
        row = max(1, tensor.nbytes // max(1, rows))
        # A row belongs to the share in which it begins.
        begin, end = (min(rows, max(0, -(-(edge - at) // row))) for edge in (first, last))
        if share == shares - 1:
            end = rows
        if not tensor.numel():
            begin, end = (0, rows) if share == 0 else (0, 0)
        if end > begin or (share == 0 and not tensor.numel()):
            start = (begin, *(0,) * (tensor.dim() - 1)) if tensor.dim() else ()
            pieces.append(_piece(name, tensor[begin:end] if tensor.dim() else tensor, start, tensor.shape))
        at += tensor.nbytes
    return pieces


def _local(name: str, tensor: Any) -> list[Piece]:
    """Give this rank's box of a DTensor; nothing where another rank has the same one."""
    shape, start = box(tensor)
    for dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise RankError(
                f"the state of {name.replace('/', '.')} cannot be saved",
                why="it is a DTensor with partial sums",
                fix="redistribute it first: tensor.redistribute(placements=...)",
            )
        if placement.is_replicate() and tensor.device_mesh.get_local_rank(dim):
            return []
    local = tensor.to_local()
    if not math.prod(shape) and math.prod(tensor.shape):
        return []
    return [_piece(name, local.view(shape), start, tensor.shape)]


def box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and first index of this rank's box of a DTensor."""
    from importlib import import_module

    # It moved with torch 2.5.
    package = "torch.distributed.tensor" if hasattr(torch.distributed, "tensor") else "torch.distributed._tensor"
    compute = import_module(f"{package}._utils").compute_local_shape_and_global_offset
    shape, start = compute(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(start)
