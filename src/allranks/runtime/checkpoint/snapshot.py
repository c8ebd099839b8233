"""A snapshot: a copy of the training's state at one step, and which rank writes which piece of it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allranks.errors import RankError
from allranks.record.checkpoints import CONFIG, OBJECTS
from allranks.runtime.checkpoint.saving import Buffer
from allranks.runtime.checkpoint.state import StatePart, split
from allranks.runtime.seed import random_states

if TYPE_CHECKING:
    from concurrent.futures import Future

    from allranks.runtime.context import Context

#: Alignment of tensors in a data file, in bytes: any dtype can be viewed there.
ALIGNMENT = 64
#: Least bytes that each rank writes when the work is shared; below, the extra files cost more.
LEAST_SHARE = 64 << 20
#: Most ranks that share the writing of equal tensors.
MOST_WRITERS = 16


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that this rank writes: ``source``, whose first element has the index ``start`` in the tensor.

    ``whole`` is the shape of the tensor, ``offset`` the position in the data file, in bytes.
    """

    name: str
    source: Tensor
    start: tuple[int, ...]
    whole: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class FileLayout:
    """What this rank writes: pieces in the order of the data file, and its size in bytes.

    ``aliases`` maps tensors to another one that is the same memory, and is written.
    """

    pieces: tuple[Piece, ...]
    size: int
    aliases: dict[str, str]

    def index(self) -> dict[str, Any]:
        """Return the tensors of this file as plain JSON."""
        found: dict[str, Any] = {}
        for piece in self.pieces:
            dtype = str(piece.source.dtype).removeprefix("torch.")
            entry = {"dtype": dtype, "itemsize": piece.source.element_size(), "shape": piece.whole, "chunks": []}
            found.setdefault(piece.name, entry)["chunks"].append((piece.offset, piece.start, tuple(piece.source.shape)))
        return found


@dataclass(frozen=True)
class Snapshot:
    """What this rank is to write: pieces of tensors, copied to a buffer, and objects.

    ``several`` is True if ranks other than 0 write too.
    """

    layout: FileLayout
    buffer: Buffer
    objects: dict[str, Any]
    several: bool

    def small_files(self) -> dict[str, bytes]:
        """Return names and contents of the files that rank 0 writes besides tensors."""
        stream = io.BytesIO()
        torch.save(self.objects, stream)
        return {OBJECTS: stream.getvalue(), CONFIG: json.dumps(self.objects["config"], indent=2).encode()}


class Snapshots:
    """Takes snapshots of the parts.

    ``shared_disk`` is True if all ranks can write to the directory of checkpoints, so that they can share the work.
    """

    def __init__(self, ctx: Context, parts: Sequence[StatePart], config: dict[str, Any], *, shared_disk: bool) -> None:
        self._ctx = ctx
        self._parts = parts
        self._config = config
        self._shared_disk = shared_disk
        self._pinned = ctx.device.type == "cuda"
        self.buffer: Buffer | None = None
        self._touched: Future[None] | None = None

    def reserve(self, run: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Allocate the buffer for the state as it is now, and have ``run`` touch its pages in a thread."""
        self._touched = run(self._fitting(self._lay_out()[1].size).touch)

    def take(self) -> Snapshot:
        """Copy the state; all ranks call it at the same step."""
        skeletons, layout, several = self._lay_out()
        if self._touched:
            self._touched.result()
        buffer = self._fitting(layout.size)
        for piece in layout.pieces:
            if piece.source.numel():
                target = buffer.bytes[piece.offset : piece.offset + piece.source.nbytes].view(piece.source.dtype)
                target.view(piece.source.shape).copy_(piece.source, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.synchronize(self._ctx.device)
        random = self._ctx.control.gather(random_states(self._ctx.device))
        shapes = {part.name: part.shapes() for part in self._parts if part.kind == "optimizer"}
        objects = {"parts": skeletons, "shapes": shapes, "config": self._config, "random": random}
        return Snapshot(layout, buffer, objects, several)

    def _lay_out(self) -> tuple[dict[str, Any], FileLayout, bool]:
        """Return the state without its tensors, this rank's file layout, and whether several ranks write."""
        skeletons: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for part in self._parts:
            skeletons[part.name], found = split(part.name, part.held.state_dict())
            tensors.update(found)
        world_size = self._ctx.world_size
        equal = self._equal_tensors(tensors) if self._shared_disk and world_size > 1 else set()
        writers = choose_writers(sum(tensors[name].nbytes for name in equal), world_size)
        several = len(writers) > 1 or any(map(is_sharded, tensors.values()))
        return skeletons, make_layout(tensors, equal, self._ctx.rank, writers), several

    def _fitting(self, size: int) -> Buffer:
        if self.buffer is None or self.buffer.size < size:
            self.buffer = None  # Free the old one first.
            self.buffer = Buffer(size, pinned=self._pinned)
        return self.buffer

    def _equal_tensors(self, tensors: dict[str, Tensor]) -> set[str]:
        """Return the names of the tensors that data parallelism keeps equal on all ranks: not buffers or averages."""
        averaged = {id(parameter) for part in self._parts if part.replicated for parameter in part.parameters()}
        names: set[str] = set()
        for part in self._parts:
            if part.replicated:
                names.update(f"{part.name}/{name}" for name, _ in part.held.named_parameters())
            elif part.kind == "optimizer" and averaged.issuperset(map(id, part.parameters())):
                names.update(name for name in tensors if name.startswith(f"{part.name}/state/"))
        return names & tensors.keys()


def is_sharded(tensor: object) -> bool:
    """Return True for a DTensor, which is distributed over ranks."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def make_layout(tensors: Mapping[str, Tensor], equal: set[str], rank: int, writers: Sequence[int]) -> FileLayout:
    """Decide which pieces of the tensors ``rank`` writes. All ranks compute the same, without communication.

    The ``equal`` ones have the same values on all ranks, so that any of the ``writers`` may write them.
    """
    unique, aliases = _without_aliases(tensors)
    pieces = [piece for name, tensor in unique.items() if is_sharded(tensor) for piece in _local(name, tensor)]
    whole = {name: tensor for name, tensor in unique.items() if not is_sharded(tensor)}
    if len(writers) < 2:
        equal = set()
    if rank == 0:
        for name, tensor in whole.items():
            if name not in equal:
                pieces.append(Piece(name, tensor, (0,) * tensor.dim(), tuple(tensor.shape)))
    if rank in writers:
        common = [(name, tensor) for name, tensor in whole.items() if name in equal]
        pieces += _share(common, writers.index(rank), len(writers))
    placed, end = [], 0
    for piece in pieces:
        placed.append(replace(piece, offset=end))
        end += -(-piece.source.nbytes // ALIGNMENT) * ALIGNMENT
    return FileLayout(tuple(placed), end, aliases if rank == 0 else {})


def choose_writers(size: int, world_size: int) -> list[int]:
    """Return the ranks that share the writing of ``size`` bytes: spread over the nodes, and not too many."""
    count = max(1, min(world_size, MOST_WRITERS, size // LEAST_SHARE))
    return [number * world_size // count for number in range(count)]


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Find tensors that are the same memory under several names, such as tied weights."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        if is_sharded(tensor) or not tensor.numel():
            unique[name] = tensor
            continue
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if first.setdefault(key, name) == name:
            unique[name] = tensor
        else:
            aliases[name] = first[key]
    return unique, aliases


def _share(tensors: Sequence[tuple[str, Tensor]], share: int, shares: int) -> list[Piece]:
    """Cut the bytes of all tensors, laid end to end, into equal shares, at whole rows of a tensor."""
    total = sum(tensor.nbytes for _, tensor in tensors)
    first, last = total * share // shares, total * (share + 1) // shares
    pieces, at = [], 0
    for name, tensor in tensors:
        shape = tuple(tensor.shape)
        if not shape or not tensor.numel():  # It has no rows: it belongs to the share in which it starts.
            if first <= at < last or (at == total and share == shares - 1):
                pieces.append(Piece(name, tensor, (0,) * len(shape), shape))
        else:
            row = tensor.nbytes // shape[0]
            # A row belongs to the share in which it starts.
            begin, end = (min(shape[0], max(0, -(-(edge - at) // row))) for edge in (first, last))
            if end > begin:
                pieces.append(Piece(name, tensor[begin:end], (begin, *(0,) * (len(shape) - 1)), shape))
        at += tensor.nbytes
    return pieces


def _local(name: str, tensor: Any) -> list[Piece]:
    """Return this rank's box of a DTensor; none if it is empty, or another rank has the same one."""
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
    if not math.prod(shape) and math.prod(tensor.shape):
        return []
    return [Piece(name, tensor.to_local().view(shape), start, tuple(tensor.shape))]


def box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and first index of this rank's box of a DTensor."""
    # The module was renamed in torch 2.5.
    package = "torch.distributed.tensor" if hasattr(torch.distributed, "tensor") else "torch.distributed._tensor"
    compute = import_module(f"{package}._utils").compute_local_shape_and_global_offset
    shape, start = compute(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(start)
