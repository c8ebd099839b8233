"""How far the training is, and what the current batch stands for: what loader, optimizer and checkpoints share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allranks.runtime.model.weighing import Accumulation


@dataclass(slots=True)
class Progress:
    """The position of this rank in the training loop.

    The loader writes what the current batch is, ``accumulate`` where it lies in an effective batch, and the
    optimizer counts steps. All of it is plain attributes: they are read and written in every step.

    Attributes:
        step: optimizer steps done since the beginning of the training, over all attempts; equal on all ranks.
        samples: samples of the current batch on this rank that count (0 for a filler); None without a loader.
        total: samples of the current batch over all ranks; None without a loader.
        full: samples of a full batch over all ranks.
        last: samples over all ranks of the last batch of the epoch.
        left: batches that follow in this epoch; None where that is not known.
        accumulation: micro-batches in the current effective batch.
        micro: number of the current micro-batch in it, from 0.
        backwards: backward passes that synchronised gradients since the start of this process.
        weighed: calls of ``ctx.backward`` that completed an effective batch.
        open: blocks of ``accumulate`` that the script is in.
        blocks: blocks of ``accumulate`` that were entered.
        plain: backward passes outside of such blocks.
        stepped: whether the last call of ``optimizer.step()`` made a step.
        stopping: whether the job was asked to stop and has saved: the loops end.
        groups: the blocks of ``accumulate``, by model and number of micro-batches.
    """

    step: int = 0
    samples: int | None = None
    total: int | None = None
    full: int | None = None
    last: int | None = None
    left: int | None = None
    accumulation: int = 1
    micro: int = 0
    backwards: int = 0
    weighed: int = 0
    open: int = 0
    blocks: int = 0
    plain: int = 0
    stepped: bool = False
    stopping: bool = False
    groups: dict[tuple[int, int], Accumulation] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_boundary(self) -> bool:
        """Whether the current micro-batch completes an effective batch."""
        return self.micro + 1 >= self.accumulation

    def begin_backward(self) -> None:
        """Take a backward pass outside of ``accumulate`` for a batch of its own."""
        if not self.open:
            self.plain += 1
            self.accumulation = 1
            self.micro = 0

    def abandon(self) -> None:
        """Forget effective batches that are not full: what would fill them does not come any more."""
        for group in self.groups.values():
            group.abandon()
        self.accumulation = 1
        self.micro = 0

    def state_dict(self) -> dict[str, int]:
        """Give what a checkpoint holds: the number of steps."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.step = state["step"]
