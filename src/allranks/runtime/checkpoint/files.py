"""What one save writes and how it is made to count, as the thread beside the training does it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allranks.runs.checkpoints import Manifest
from allranks.runtime.checkpoint import commit as commits
from allranks.runtime.checkpoint.saving import Written
from allranks.runtime.checkpoint.writing import write_rank
from allranks.runtime.say import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allranks.runtime.checkpoint.buffer import Buffer
    from allranks.runtime.checkpoint.capture import Moment
    from allranks.runtime.checkpoint.parts import Part
    from allranks.runtime.context import Context


class Files:
    """Writes the files of this rank; on rank 0 also makes a checkpoint count and removes old ones.

    Args:
        ctx: the context.
        folder: of the checkpoints.
        keep: how many to keep.
        best: name of the metric, and whether its ``min`` or ``max`` is best.
        config: of the script.
        parts: all that are saved.

    Attributes:
        probe: what :func:`folder.prepare` writes for a try; the same on all ranks.
        damaged: checkpoints that were found damaged, which do not count as kept.
    """

    def __init__(
        self,
        ctx: Context,
        folder: Path,
        *,
        keep: int,
        best: tuple[str, str] | None,
        config: dict[str, Any],
        parts: Sequence[Part],
    ) -> None:
        self._ctx = ctx
        self._folder = folder
        self._keep = keep
        self._best = best
        self._config = config
        self._parts = parts
        self._job = ctx.control.broadcast(commits.job_id())
        self.probe = folder / ctx.control.broadcast(commits.temporary_name(0, commits.owner(self._job, 0)))
        self.damaged: set[Path] = set()
        self._began = time.time()
        self._saves = 0
        self._sequence = 0
        self._floor = -1
        self._told = False

    def tidy(self) -> None:
        """Remove what earlier processes have left, and see how many saves there were."""
        if self._ctx.is_main:
            commits.clear_unfinished(self._folder, self._job)
            self._sequence = commits.last_sequence(self._folder)

    def begin_anew(self) -> None:
        """Leave alone from now on what is there: it is neither removed nor replaced, and counts for nothing."""
        self._floor = self._sequence

    def temporary(self, step: int, *, several: bool) -> Path:
        """Choose where a save is written; the same on all ranks, if several write."""
        self._saves += 1
        name = commits.temporary_name(step, commits.owner(self._job, self._saves))
        return self._folder / (self._ctx.control.broadcast(name) if several else name)

    def manifest(self, step: int, metric: float | None) -> Callable[[Written], Manifest]:
        """Give what makes the manifest, once it is known what was written."""
        self._sequence += 1
        # As the state has it: after the last batch, that is the next one.
        epochs = [part.held.state_dict().get("epoch") for part in self._parts if hasattr(part.held, "epoch")]
        return partial(
            Manifest,
            step,
            self._sequence,
            time.time(),
            self._ctx.world_size,
            self._job,
            next((epoch for epoch in epochs if isinstance(epoch, int)), None),
            metric,
            self._best[0] if self._best else None,
            {part.name: part.kind for part in self._parts},
            torch=torch.__version__,
        )

    def write(self, temporary: Path, moment: Moment, buffer: Buffer) -> Written:
        """Write this rank's files."""
        small = {}
        if self._ctx.is_main:
            commits.clear_unfinished(self._folder, self._job, but=temporary)
            small = moment.small_files(self._config)
        layout, rank = moment.layout, self._ctx.rank
        index = {"data": f"rank-{rank}.data", "tensors": layout.index(), "aliases": layout.aliases}
        return write_rank(temporary, rank, buffer, layout.size, index, small)

    def commit(self, temporary: Path, manifest: Any, written: Written) -> Written:
        """Make a save count, and remove what is superfluous then."""
        made = manifest(files=written)
        target = commits.commit(temporary, made, self._floor)
        self.damaged.discard(target)
        self.note(target, made.step)
        try:
            self._prune()
        except Exception as error:  # noqa: BLE001 - the checkpoint is durable, whatever happens to older ones
            say(f"warning: old checkpoints in {self._folder} could not be removed: {type(error).__name__}: {error}")
        return written

    def note(self, target: Path | None, step: int, *, leaving: bool = False) -> None:
        """Note a checkpoint that counts, or with None from which step this attempt goes on, or that it leaves."""
        try:
            commits.note(target, step, leaving=leaving)
        except OSError as error:
            say(f"warning: the run's record does not have the checkpoint of step {step}: {error}")

    def _prune(self) -> None:
        mode = self._best[1] if self._best else None
        foreign = commits.prune(self._folder, self._keep, mode, self._job, self._began, self.damaged, floor=self._floor)
        if foreign and not self._told:
            self._told = True
            say(f"another job saves to {self._folder} too ({foreign[0]}): give each job a folder of its own")
