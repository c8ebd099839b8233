"""The position in the training, shared by loader, optimizer, metrics and checkpoints, and a sign of progress.

The sign is a counter in a file; the node's agent reads it to find out whether the rank advances.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from allranks import contract
from allranks.record.steptime import Place
from allranks.runtime.steptime import StepClock

if TYPE_CHECKING:
    from allranks.runtime.model.backward import Accumulation

_BYTES = 8
_counter = memoryview(bytearray(_BYTES)).cast("Q")


@dataclass(slots=True)
class Progress:
    """The position of this rank in the training loop.

    The loader sets the current batch, ``accumulate`` its place in an effective batch, and the optimizer counts steps.
    These are plain attributes, as they are read and written in every step.

    Attributes:
        step: number of optimizer steps since the beginning of the training, over all attempts; the same on all ranks.
        samples: number of samples in the current batch on this rank (0 for a filler); None without a loader.
        total: number of samples in the current batch over all ranks; None without a loader.
        full: number of samples in a full batch over all ranks.
        last: number of samples in the last batch of the epoch over all ranks.
        left: number of batches that follow in this epoch; None if unknown.
        epoch: number of the epoch from 1, number of epochs (0 if unknown), and batches of an epoch (0 if unknown).
        accumulation: number of micro-batches in the current effective batch.
        micro: index of the current micro-batch in it, from 0.
        backwards: backward passes that synchronised gradients since the start of this process.
        weighed: calls of ``ctx.backward`` that completed an effective batch.
        open: blocks of ``accumulate`` that the script is in.
        blocks: blocks of ``accumulate`` that were entered.
        plain: backward passes outside of such blocks.
        counted: True once there is an optimizer of the context, whose steps count.
        stepped: True if the last call of ``optimizer.step()`` made a step.
        stopping: True once the job was asked to stop and has saved: loops end.
        groups: the blocks of ``accumulate``, by model and number of micro-batches.
        clock: records where the time of the steps goes.
    """

    step: int = 0
    samples: int | None = None
    total: int | None = None
    full: int | None = None
    last: int | None = None
    left: int | None = None
    epoch: tuple[int, int, int] = (0, 0, 0)
    accumulation: int = 1
    micro: int = 0
    backwards: int = 0
    weighed: int = 0
    open: int = 0
    blocks: int = 0
    plain: int = 0
    counted: bool = False
    stepped: bool = False
    stopping: bool = False
    groups: dict[tuple[int, int], Accumulation] = field(default_factory=dict, repr=False, compare=False)
    clock: StepClock = field(default_factory=StepClock, repr=False, compare=False)

    @property
    def is_boundary(self) -> bool:
        """True if the current micro-batch completes an effective batch."""
        return self.micro + 1 >= self.accumulation

    def place(self) -> Place:
        """Return the position of the training in its epochs, as far as it is known."""
        number, count, length = self.epoch
        return Place(number, count, self.left, length) if self.left is not None and length else Place()

    def start_backward(self) -> None:
        """Count a backward pass outside of ``accumulate`` as a batch of its own."""
        if not self.open:
            self.plain += 1
            self.accumulation = 1
            self.micro = 0

    def abandon(self) -> None:
        """Drop incomplete effective batches."""
        for group in self.groups.values():
            group.abandon()
        self.accumulation = 1
        self.micro = 0

    def state_dict(self) -> dict[str, int]:
        """Return the state to save: the number of steps."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load the result of :meth:`state_dict`."""
        self.step = state["step"]


def connect_counter() -> None:
    """Count in the file that the agent has named; in private memory if there is none, or the disk is full."""
    global _counter
    if not (path := os.environ.get(contract.STEP_FILE)):
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _BYTES)  # Writing to a mapped page without disk space kills the process.
            _counter = memoryview(mmap.mmap(descriptor, _BYTES)).cast("Q")
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        pass  # The agent then relies on the rank's output.


def advance() -> None:
    """Count a step or a batch: a write to memory, which never waits for a disk."""
    _counter[0] += 1
