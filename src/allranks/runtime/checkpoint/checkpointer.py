"""``ctx.checkpoints()``: when the state of a training is saved, and what is continued from."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allranks.errors import RankError
from allranks.runs.checkpoints import name_of
from allranks.runtime import stop
from allranks.runtime.checkpoint import folder as folders
from allranks.runtime.checkpoint import parts as kinds
from allranks.runtime.checkpoint.capture import Capture
from allranks.runtime.checkpoint.files import Files
from allranks.runtime.checkpoint.layout import is_sharded
from allranks.runtime.checkpoint.restore import Resumed, resume
from allranks.runtime.checkpoint.saving import Outcome, Saver
from allranks.runtime.checkpoint.schedule import Every, Looks
from allranks.runtime.say import say

if TYPE_CHECKING:
    from allranks.runtime.context import Context

#: Seconds between two looks at each other: so long may a rank's request to stop stay unseen.
_LOOK = 0.5
#: The same, while several ranks write: the sooner all know that it is written, the sooner it counts.
_LOOK_WHILE_WRITING = 0.1


class Checkpointer:
    """Saves the parts of a training, after resuming from the newest complete checkpoint.

    Made by :meth:`Context.checkpoints`, which describes it. All methods are collective: all ranks call them at the
    same steps.

    Attributes:
        folder: directory of the checkpoints.
        resumed: the checkpoint that the training resumed from; None if it starts from the beginning.
        last: path of the last durable checkpoint that this process saved; None before the first.
        last_error: why the last save failed; None if it succeeded.
    """

    def __init__(
        self,
        ctx: Context,
        folder: Path,
        *,
        keep: int,
        best: tuple[str, str] | None,
        every: Every,
        config: dict[str, Any],
        background: bool,
        leave_before: float,
        save_at_end: bool,
        own: list[kinds.Part],
    ) -> None:
        self.folder = folder
        self.resumed: Resumed | None = None
        self.last: Path | None = None
        self.last_error: RankError | None = None
        self._ctx = ctx
        self._progress = ctx.progress
        self._every = every
        self._background = background
        self._save_at_end = save_at_end
        self._own = own
        self._around = kinds.of_context(ctx)
        self._counts = not any(hasattr(part.held, "_around") for part in own)
        self._closed = False
        self._warned = False
        stop.listen(margin=leave_before)
        self._files = Files(ctx, folder, keep=keep, best=best, config=config, parts=[*own, *self._around])
        self._seen = folders.prepare(ctx, self._files.probe, self._files.tidy)
        self._refuse_unseen()
        self._saver = Saver(ctx.control, ctx.rank, ctx.world_size, ctx._store)
        self._capture = Capture(ctx, [*own, *self._around], config, seen=self._seen)
        self._ready()

    def _ready(self) -> None:
        """Start to count from where the training stands."""
        self._looks = Looks(self._progress.step)
        self._saved_step = self._progress.step
        self._saved_at = time.monotonic()
        self._reserved = False

    def resume(self) -> None:
        """Continue from the newest whole checkpoint, if there is one."""
        self.resumed, self._files.damaged = resume(self._ctx, self.folder, self._own, self._around, seen=self._seen)
        self._ready()
        if self._ctx.is_main:
            self._files.note(None, self._progress.step)

    def begin_anew(self) -> None:
        """Leave alone what is there: it is neither loaded nor removed nor replaced."""
        self._files.begin_anew()

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._closed

    def step(self, metric: float | torch.Tensor | None = None) -> bool:
        """Save if a save is due, and return True if the job is to stop. Call it at the end of each step of the loop.

        It does nothing between the micro-batches of an effective batch. Ranks synchronise about every half second, at
        the same step. If one of them was asked to stop (Ctrl-C, SIGHUP, SIGTERM, SIGUSR1, SIGUSR2, or the end of the
        job's time), all save, wait until the checkpoint is durable, and get True. A save that is due while the last one
        is still being written is postponed until that is done.

        Args:
            metric: the metric that ``best`` compares, if this call saves.

        Returns:
            True if the loop is to end.
        """
        progress = self._progress
        if progress.stopping or progress.micro + 1 < progress.accumulation:
            return progress.stopping
        if self._counts and not progress.stepped:
            progress.step += 1
        return progress.step >= self._looks.next and self._look(metric)

    def save(self, metric: float | torch.Tensor | None = None) -> None:
        """Save now, in the background unless ``background=False``; it first waits for a save that is being written.

        A full or missing disk does not end the training: the error is reported on stderr and in ``last_error``, and
        existing checkpoints stay. If a rank was asked to stop, all wait until the save is durable, and ``ctx.stopping``
        becomes True, which ends the epochs of loaders.

        Args:
            metric: the metric that ``best`` compares.

        Raises:
            RankError: a part's state holds a value that cannot be saved (the error names its key), or it is called
                within an effective batch.
        """
        self._refuse_within_batch()
        self._save(metric)
        if self._progress.stopping:
            return
        reason = stop.requested()
        if self._ctx.control.agree(int(reason is not None))[0]:
            self._leave(reason)

    def _save(self, metric: float | torch.Tensor | None) -> None:
        self._finish()
        self._start(metric)
        if not self._background:
            self._finish()

    def wait(self) -> bool:
        """Wait for the last save; return True if it is durable, and False if it failed."""
        self._finish()
        return self.last_error is None

    def close(self) -> None:
        """Save the last step, unless it is already saved, and stop writing. Closing the context calls it."""
        if self._closed:
            return
        self._closed = True
        self._finish()
        progress = self._progress
        if self._save_at_end and progress.is_boundary and not progress.stopping and progress.step > self._saved_step:
            self._start(None)
            self._finish()
        self._saver.close()

    def _look(self, metric: float | torch.Tensor | None) -> bool:
        """Agree with the other ranks on what is to be done now, and do it."""
        step, saver = self._progress.step, self._saver
        reason = stop.requested()
        if self._ctx.world_size == 1 and self._is_quiet(step, reason):
            self._looks.next = step + 1
            return False
        told = (
            reason is not None,
            self._is_time(),
            saver.pending,
            saver.failed,
            self._looks.microseconds_per_step(step),
        )
        stopping, due, pending, failed, microseconds = self._ctx.control.agree(*map(int, told))
        if saver.busy and not pending:
            self._tell(saver.settle(failed=bool(failed)))
        if stopping:
            self._stop(reason, metric)
            return True
        if (due or self._is_due(step)) and not saver.busy:
            self._save(metric)
        elif not self._reserved and not saver.busy:
            self._capture.reserved = saver.run(self._capture.reserve().touch)
        self._reserved = True
        self._plan(step, microseconds)
        return False

    def _is_quiet(self, step: int, reason: str | None) -> bool:
        """Whether there is nothing to do and nobody to ask."""
        return self._reserved and not (reason or self._saver.busy or self._is_time() or self._is_due(step))

    def _plan(self, step: int, microseconds: int) -> None:
        if self._ctx.world_size == 1:
            self._looks.next = step + 1
            return
        self._looks.plan(step, microseconds, _LOOK_WHILE_WRITING if self._saver.shared else _LOOK)
        if self._every.steps and not self._is_due(step):
            self._looks.next = min(self._looks.next, (self._saved_step // self._every.steps + 1) * self._every.steps)

    def _is_time(self) -> bool:
        return self._every.seconds is not None and time.monotonic() - self._saved_at >= self._every.seconds

    def _is_due(self, step: int) -> bool:
        """Whether a multiple of ``every`` was passed since the last save."""
        every = self._every.steps
        return every is not None and step // every > self._saved_step // every

    def _stop(self, reason: str | None, metric: float | torch.Tensor | None) -> None:
        self._finish()
        self._start(metric)
        self._leave(reason)

    def _leave(self, reason: str | None) -> None:
        """Wait until the last save is durable, and have the loops end."""
        reasons = self._ctx.control.gather(reason)
        rank = next(rank for rank, some in enumerate(reasons) if some)
        self._finish()
        self._progress.stopping = True
        saved = f"saved {self.last}" if self.last_error is None else "nothing was saved"
        if self._ctx.is_main:
            where = f" (rank {rank})" if self._ctx.world_size > 1 else ""
            say(f"stopping at step {self._progress.step}: {reasons[rank]}{where}; {saved}")
            self._files.note(self.last, self._progress.step, leaving=self.last_error is None)

    def _start(self, metric: float | torch.Tensor | None) -> None:
        """Copy the state and begin to write it."""
        self._warn_of_missing()
        step = self._progress.step
        moment = self._capture.take()
        temporary = self._files.temporary(step, several=moment.several)
        manifest = self._files.manifest(step, None if metric is None else float(metric))
        writes = self._ctx.is_main or (moment.several and moment.layout.size)
        assert self._capture.buffer is not None
        self._saver.start(
            step,
            temporary,
            partial(self._files.write, temporary, moment, self._capture.buffer) if writes else None,
            partial(self._files.commit, temporary, manifest),
            several=moment.several,
        )
        self._saved_step, self._saved_at = step, time.monotonic()

    def _finish(self) -> None:
        self._tell(self._saver.finish())

    def _tell(self, outcome: Outcome | None) -> None:
        """Take note of how a save ended; rank 0 tells of a failure and removes what is left of it."""
        if outcome is None:
            return
        if outcome.failure is None:
            self.last, self.last_error = self.folder / name_of(outcome.step), None
            return
        there = f"{self.last} stays the newest checkpoint" if self.last else "checkpoints that were there stay"
        self.last_error = RankError(
            f"the checkpoint of step {outcome.step} could not be saved to {self.folder}",
            why=outcome.failure,
            fix=f"free some space, or see why the folder is not there; training goes on, and {there}",
        )
        if self._ctx.is_main:
            say(f"error: {self.last_error}")
            self._saver.run(partial(shutil.rmtree, outcome.temporary, ignore_errors=True))

    def _warn_of_missing(self) -> None:
        """Tell once of a loader or an optimizer of the context that is at work and not saved."""
        progress = self._progress
        missing = []
        if progress.samples is not None and not any(hasattr(part.held, "epochs") for part in self._own):
            missing.append("the loader is not among the parts: its epochs begin anew after a resume")
        if progress.stepped and self._counts:
            missing.append("the optimizer is not among the parts: its state is lost on a resume")
        if missing and not self._warned:
            self._warned = True
            if self._ctx.is_main:
                say(f"warning: ctx.checkpoints(): {'; '.join(missing)}")

    def _refuse_within_batch(self) -> None:
        """Check that no gradients are being added up, which are not saved.

        Raises:
            RankError: the last micro-batch was not the last of its effective batch.
        """
        progress = self._progress
        if not progress.is_boundary:
            raise RankError(
                "checkpoints.save() within an effective batch, after micro-batch "
                f"{progress.micro + 1} of {progress.accumulation}",
                why="the gradients added up so far are not saved, so a resume would leave their samples out",
                fix="save after the optimizer.step() of the last micro-batch, or use checkpoints.step(), which waits",
            )

    def _refuse_unseen(self) -> None:
        """Check that ranks which have to write can.

        Raises:
            RankError: a sharded model, and a folder that is not the same on all ranks.
        """
        sharded = any(is_sharded(parameter) for part in self._own for parameter in part.parameters())
        if sharded and not self._seen:
            raise RankError(
                f"not all ranks see the same {self.folder}, or can write to it",
                why="of a sharded model, each rank writes its own part",
                fix="give ctx.checkpoints() a folder on a file system that all nodes share",
            )
