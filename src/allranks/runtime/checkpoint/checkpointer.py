"""``ctx.checkpoints()``: saves the state of a training and resumes from it."""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allranks.errors import RankError
from allranks.record.checkpoints import name_of
from allranks.runtime import log, stop
from allranks.runtime.call_errors import answering
from allranks.runtime.checkpoint.directory import CheckpointDirectory, note_save
from allranks.runtime.checkpoint.restore import Resumed, load_newest
from allranks.runtime.checkpoint.saving import Save, Saver
from allranks.runtime.checkpoint.schedule import AGREE_SECONDS, SaveSchedule, check_keep, parse_time
from allranks.runtime.checkpoint.snapshot import Snapshots, is_sharded
from allranks.runtime.checkpoint.state import StatePart
from allranks.runtime.progress import advance
from allranks.runtime.steptime import CHECKPOINT

if TYPE_CHECKING:
    from allranks.runtime.context import Context

#: AGREE_SECONDS while several ranks write, so that a written checkpoint is committed soon.
_AGREE_SECONDS_WRITING = 0.1


def make_checkpointer(
    ctx: Context,
    folder: str | Path,
    *,
    keep: int = 3,
    best: str | None = None,
    every: int | str | None = None,
    resume: bool = True,
    config: dict[str, Any] | None = None,
    background: bool = True,
    leave_before: str = "1min",
    save_at_end: bool = True,
    **parts: Any,
) -> Checkpointer:
    """Resume from the newest complete checkpoint in a directory, and save there from now on.

    Call it on all ranks once everything that it saves exists, and call ``step()`` of the result at the end of each
    step of the loop. A checkpoint holds the parts, the number of steps, the scale of fp16 gradients, metrics, the
    random states of all ranks and ``config``. It is written in the background, has checksums, and counts once all
    of it is on disk. The loop only waits while the state is copied into memory, which takes as much memory again.
    Loading verifies the checksums: a corrupt checkpoint is reported and skipped. Another number of ranks can resume
    from it, also with sharded models.

    From here on SIGTERM, the first Ctrl-C or SIGHUP, SIGUSR1, SIGUSR2 and the end of the job's time are requests to
    stop: see :meth:`Checkpointer.step`. SIGUSR1 and SIGUSR2 count from :func:`allranks.init` on. A context has one
    checkpointer at a time.

    Args:
        folder: directory of the checkpoints, created if missing. Use it for one job only:
            ``ctx.run_dir / "checkpoints"`` is continued by ``allranks resume`` and when a scheduler restarts the
            job, and not by another run.
        keep: number of newest checkpoints to keep.
        best: also keep the checkpoint with the best metric: ``"loss:min"``, ``"accuracy:max"``. Pass the metric to
            ``save(metric)`` or ``step(metric)``.
        every: save after this many steps (``500``, ``"500 steps"``) or this much time (``"10min"``, ``"1h"``).
            None saves only by ``save()``, on a stop request and at the end.
        resume: False starts from the beginning. Checkpoints that exist stay as they are, and do not count for
            ``keep`` and ``best``.
        config: plain values to store in the checkpoint, such as hyperparameters.
        background: False makes each save wait until it is durable.
        leave_before: how long before the end of the job's time to save and exit, such as ``"90 s"``. The end is
            read from ``ALLRANKS_END_TIME`` or the scheduler's variable, such as ``SLURM_JOB_END_TIME``, in seconds
            since 1970.
        save_at_end: save when the context is closed, unless the last step is already saved; not after an error.
        parts: what to save, by name: models, optimizers, loaders, schedulers, or anything with ``state_dict`` and
            ``load_state_dict``. Values that are not tensors are taken from rank 0.

    Raises:
        RankError: the directory is not writable; an argument is invalid; it was already called; or the newest
            complete checkpoint is of another model (the error names the keys, and nothing was loaded).
    """
    check_keep(keep)
    _refuse_second(ctx)
    compared, schedule, plain = _parse_best(best), SaveSchedule(every), _plain(config or {})
    margin = parse_time("leave_before", leave_before)
    if not parts:
        raise RankError("ctx.checkpoints() without anything to save", fix="name the parts: model=model, optimizer=...")
    options = inspect.signature(make_checkpointer).parameters
    own = [StatePart(name, given, options) for name, given in parts.items()]
    stop.listen(margin=margin)
    directory = CheckpointDirectory(ctx, Path(folder), keep=keep, best=compared)
    return Checkpointer(
        ctx, own, directory, schedule, plain, resume=resume, background=background, save_at_end=save_at_end
    )


class Checkpointer:
    """Saves the parts of a training, after resuming from the newest complete checkpoint.

    Made by ``ctx.checkpoints()``. All methods are collective: all ranks call them at the same steps.

    Attributes:
        folder: directory of the checkpoints.
        resumed: the checkpoint that the training resumed from; None if it starts from the beginning.
        last: path of the last durable checkpoint that this process saved; None before the first.
        last_error: why the last save failed; None if it succeeded.
        closed: True after :meth:`close`.
    """

    def __init__(
        self,
        ctx: Context,
        own: list[StatePart],
        directory: CheckpointDirectory,
        schedule: SaveSchedule,
        config: dict[str, Any],
        *,
        resume: bool,
        background: bool,
        save_at_end: bool,
    ) -> None:
        self._ctx = ctx
        self._own = own
        self._directory = directory
        self._schedule = schedule
        self._background = background
        self._save_at_end = save_at_end
        self._progress = ctx.progress
        self._counts_steps = not any(hasattr(part.held, "_around") for part in own)
        self._warned = False
        self.folder = directory.path
        self.resumed: Resumed | None = None
        self.last: Path | None = None
        self.last_error: RankError | None = None
        self.closed = False
        internal = [StatePart("ctx.progress", ctx.progress), StatePart("ctx.metrics", ctx.metrics)]
        if ctx.precision == "fp16":
            internal.append(StatePart("ctx.scaler", ctx.scaler))
        self._parts = [*own, *internal]
        shared_disk = directory.prepare()
        if not shared_disk and any(is_sharded(parameter) for part in own for parameter in part.parameters()):
            raise RankError(
                f"not all ranks see the same {self.folder}, or can write to it",
                why="of a sharded model, each rank writes its own part",
                fix="give ctx.checkpoints() a directory on a file system that all nodes share",
            )
        self._saver = Saver(ctx)
        self._snapshots = Snapshots(ctx, self._parts, config, shared_disk=shared_disk)
        if resume:
            self.resumed, directory.corrupt = load_newest(ctx, self.folder, own, internal, shared_disk=shared_disk)
            if ctx.is_main:
                note_save(None, ctx.progress.step)
        else:
            directory.leave_alone()
        schedule.start(ctx.progress.step)
        ctx.closing.append(self.close)

    @answering
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
        _check_metric("step", metric)
        progress = self._progress
        advance()
        if progress.stopping or progress.micro + 1 < progress.accumulation:
            return progress.stopping
        if self._counts_steps and not progress.stepped:
            progress.step += 1
        if progress.step < self._schedule.next:
            return False
        with progress.clock.during(CHECKPOINT):
            return self._agree(metric)

    @answering
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
        _check_metric("save", metric)
        progress = self._progress
        if not progress.is_boundary:
            raise RankError(
                "checkpoints.save() within an effective batch, after micro-batch "
                f"{progress.micro + 1} of {progress.accumulation}",
                why="the gradients added up so far are not saved, so a resume would leave their samples out",
                fix="save after the optimizer.step() of the last micro-batch, or use checkpoints.step(), which waits",
            )
        with progress.clock.during(CHECKPOINT):
            self._finish()
            self._start(metric)
            if not self._background:
                self._finish()
            if progress.stopping:
                return
            reason = stop.requested()
            if self._ctx.control.agree(int(reason is not None))[0]:
                self._leave(reason)

    def wait(self) -> bool:
        """Wait for the last save; return True if it is durable, and False if it failed."""
        self._finish()
        return self.last_error is None

    def close(self) -> None:
        """Save the last step, unless it is already saved, and stop writing. Closing the context calls it."""
        if self.closed:
            return
        self.closed = True
        self._finish()
        progress = self._progress
        is_saved = progress.step <= self._schedule.saved_step or progress.stopping
        if self._save_at_end and progress.is_boundary and not is_saved:
            self._start(None)
            self._finish()
        self._saver.close()

    def _agree(self, metric: float | torch.Tensor | None) -> bool:
        """Agree with the other ranks whether to save or stop, and do it; return True if the job is to stop."""
        step, saver, schedule = self._progress.step, self._saver, self._schedule
        reason = stop.requested()
        slowness = schedule.microseconds_per_step(step)
        mine = (reason is not None, schedule.is_time(), saver.pending, bool(saver.failure), slowness)
        stopping, any_due, pending, failed, microseconds = self._ctx.control.agree(*map(int, mine))
        if saver.save and not pending:
            self._record(saver.settle(failed=bool(failed)))
        if stopping:
            self._finish()
            self._start(metric)
            self._leave(reason)
            return True
        if (any_due or schedule.is_due(step)) and not saver.save:
            self._start(metric)
            if not self._background:
                self._finish()
        elif self._snapshots.buffer is None and not saver.save:
            self._snapshots.reserve(saver.run)
        if self._ctx.world_size == 1:
            return False
        several_write = saver.save and saver.save.several
        schedule.plan(step, microseconds, _AGREE_SECONDS_WRITING if several_write else AGREE_SECONDS)
        return False

    def _leave(self, reason: str | None) -> None:
        """Wait until the last save is durable, and end the loops."""
        self._finish()
        self._progress.stopping = True
        report_stop(self._ctx, reason, f"saved {self.last}" if self.last_error is None else "nothing was saved")
        if self._ctx.is_main:
            note_save(self.last, self._progress.step, leaving=self.last_error is None)

    def _start(self, metric: float | torch.Tensor | None) -> None:
        """Copy the state and start to write it."""
        self._warn_of_missing()
        step = self._progress.step
        snapshot = self._snapshots.take()
        temporary = self._directory.temporary(step, several=snapshot.several)
        manifest = self._directory.manifest(step, None if metric is None else float(metric), self._parts)
        save = Save(step, temporary, snapshot.several, partial(self._directory.commit, temporary, manifest))
        writes = self._ctx.is_main or (snapshot.several and snapshot.layout.size)
        self._saver.start(save, partial(self._directory.write, temporary, snapshot) if writes else None)
        self._schedule.note_save(step)

    def _finish(self) -> None:
        self._record(self._saver.finish())

    def _record(self, ended: Save | None) -> None:
        """Record how a save ended; rank 0 reports a failure."""
        if ended is None:
            return
        if ended.failure is None:
            self.last, self.last_error = self.folder / name_of(ended.step), None
            return
        there = f"{self.last} stays the newest checkpoint" if self.last else "checkpoints that were there stay"
        self.last_error = RankError(
            f"the checkpoint of step {ended.step} could not be saved to {self.folder}",
            why=ended.failure,
            fix=f"free some space, or see why the directory is not there; training continues, and {there}",
        )
        if self._ctx.is_main:
            log(f"error: {self.last_error}")

    def _warn_of_missing(self) -> None:
        """Warn once if a loader or optimizer of the context is used and not saved."""
        progress = self._progress
        missing = []
        if progress.samples is not None and not any(hasattr(part.held, "epochs") for part in self._own):
            missing.append("the loader is not among the parts: its epochs start again after a resume")
        if progress.stepped and self._counts_steps:
            missing.append("the optimizer is not among the parts: its state is lost on a resume")
        if missing and not self._warned:
            self._warned = True
            if self._ctx.is_main:
                log(f"warning: ctx.checkpoints(): {'; '.join(missing)}")


def report_stop(ctx: Context, reason: str | None, saved: str) -> None:
    """Report on rank 0 why the ranks stop and what was saved; all ranks call it, each with its reason or None."""
    reasons = ctx.control.gather(reason)
    rank = next(rank for rank, some in enumerate(reasons) if some)
    if ctx.is_main:
        where = f" (rank {rank})" if ctx.world_size > 1 else ""
        log(f"stopping at step {ctx.progress.step}: {reasons[rank]}{where}; {saved}")


def _refuse_second(ctx: Context) -> None:
    """Raise if the context has an open checkpointer."""
    others = [getattr(close, "__self__", None) for close in ctx.closing]
    there = next((other for other in others if isinstance(other, Checkpointer) and not other.closed), None)
    if there is not None:
        raise RankError(
            f"ctx.checkpoints() was called before in this context, for {there.folder}",
            why="two of them would count each step twice, and when the job is asked to stop, only one would save",
            fix="give one all parts, as many as there are, or close() the first one before",
        )


def _check_metric(method: str, metric: object) -> None:
    if metric is not None and not hasattr(metric, "__float__"):
        raise RankError(
            f"checkpoints.{method}() got {type(metric).__name__} as its metric",
            why="what it saves, and where, was given to ctx.checkpoints(); it takes the number that best= compares",
            fix=f"checkpoints.{method}(), or checkpoints.{method}(accuracy)",
        )


def _parse_best(best: str | None) -> tuple[str, str] | None:
    if best is None:
        return None
    name, _, mode = best.rpartition(":") if isinstance(best, str) else ("", "", "")
    if not name or mode not in ("min", "max"):
        raise RankError(f"best={best!r} does not say what is best", fix='write best="loss:min" or best="accuracy:max"')
    return name, mode


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Check that a config is plain JSON, so that it can be read without torch."""
    for key, value in config.items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError) as error:
            raise RankError(
                f"config[{key!r}] cannot be saved", why=str(error), fix="numbers, text, lists and dicts of them only"
            ) from error
    return json.loads(json.dumps(config))  # type: ignore[no-any-return]
