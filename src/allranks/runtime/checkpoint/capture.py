"""One moment of the training: its state, copied into memory of its own, and everything that goes with it."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allranks.runs.checkpoints import CONFIG, OBJECTS
from allranks.runtime.checkpoint import random_states
from allranks.runtime.checkpoint.buffer import Buffer
from allranks.runtime.checkpoint.layout import Layout, choose_writers, is_sharded, make_layout
from allranks.runtime.checkpoint.parts import Part, shared_parameters
from allranks.runtime.checkpoint.state import take_apart

if TYPE_CHECKING:
    from concurrent.futures import Future

    from allranks.runtime.context import Context


@dataclass(frozen=True)
class Moment:
    """What this rank is to write.

    Attributes:
        layout: the pieces of tensors.
        objects: what is no tensor; with that of all ranks on rank 0.
        several: whether other ranks than 0 write too.
    """

    layout: Layout
    objects: dict[str, Any]
    several: bool

    def small_files(self, config: dict[str, Any]) -> dict[str, bytes]:
        """Return names and contents of the files that rank 0 writes besides tensors."""
        box = io.BytesIO()
        torch.save(self.objects, box)
        return {OBJECTS: box.getvalue(), CONFIG: json.dumps(config, indent=2).encode()}


class Capture:
    """Takes the state of the parts.

    Args:
        ctx: the context.
        parts: whose state it is.
        config: of the script.
        seen: whether all ranks can write to the folder of checkpoints, so that they can share the writing.
    """

    def __init__(self, ctx: Context, parts: Sequence[Part], config: dict[str, Any], *, seen: bool) -> None:
        self._ctx = ctx
        self._parts = parts
        self._config = config
        self._seen = seen
        self._pinned = ctx.device.type == "cuda"
        self.buffer: Buffer | None = None
        #: Work on the buffer's memory that has to be over before it is used.
        self.reserved: Future[Any] | None = None

    def reserve(self) -> Buffer:
        """Make the buffer, from the size that the state has now."""
        _, tensors = self._states()
        return self._fitting(self._layout(tensors)[0].size)

    def take(self) -> Moment:
        """Copy the state; all ranks call it at the same step."""
        skeletons, tensors = self._states()
        layout, several = self._layout(tensors)
        if self.reserved is not None:
            self.reserved.result()
        self._copy(layout, self._fitting(layout.size))
        random = self._ctx.control.gather(random_states.capture(self._ctx.device))
        shapes = {part.name: part.shapes() for part in self._parts if part.kind == "optimizer"}
        objects = {"parts": skeletons, "shapes": shapes, "config": self._config, "random": random}
        return Moment(layout, objects, several)

    def _states(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        skeletons: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for part in self._parts:
            skeletons[part.name], found = take_apart(part.name, part.held.state_dict())
            tensors.update(found)
        return skeletons, tensors

    def _layout(self, tensors: dict[str, Tensor]) -> tuple[Layout, bool]:
        shared = self._shared(tensors) if self._seen and self._ctx.world_size > 1 else set()
        writers = choose_writers(sum(tensors[name].nbytes for name in shared), self._ctx.world_size)
        several = len(writers) > 1 or any(map(is_sharded, tensors.values()))
        return make_layout(tensors, shared, self._ctx.rank, writers), several

    def _shared(self, tensors: dict[str, Tensor]) -> set[str]:
        """Give the names of tensors that data parallelism keeps equal on all ranks: no buffers, no averages."""
        equal = shared_parameters(list(self._parts))
        names: set[str] = set()
        for part in self._parts:
            if part.replicated:
                names.update(f"{part.name}/{name}" for name, _ in part.held.named_parameters())
            elif part.kind == "optimizer" and equal.issuperset(map(id, part.parameters())):
                names.update(name for name in tensors if name.startswith(f"{part.name}/state/"))
        return names & tensors.keys()

    def _fitting(self, size: int) -> Buffer:
        if self.buffer is None or self.buffer.size < size:
            self.buffer = None  # The old one is given back first.
            self.buffer = Buffer(size, pinned=self._pinned)
        return self.buffer

    def _copy(self, layout: Layout, buffer: Buffer) -> None:
        for piece in layout.pieces:
            if piece.nbytes:
                target = buffer.bytes[piece.offset : piece.offset + piece.nbytes].view(piece.source.dtype)
                target.view(piece.source.shape).copy_(piece.source, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.synchronize(self._ctx.device)
