"""A plug-in for Lightning: its Trainer takes ranks, stop requests and metrics from allranks.

::

    with allranks.init() as ctx:
        resume = ResumeCallback(ctx, every="10min")
        trainer = Trainer(
            devices=ctx.local_world_size,
            num_nodes=ctx.world_size // ctx.local_world_size,
            strategy="ddp",
            plugins=AllranksEnvironment(ctx),
            callbacks=[resume],
            logger=AllranksLogger(ctx),
        )
        trainer.fit(module, ctx.loader(dataset, global_batch_size=256), ckpt_path=resume.newest)

Each works alone. With the package pytorch_lightning, import that before this module.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.errors import RankError
from allranks.runtime import log, stop
from allranks.runtime.checkpoint.checkpointer import report_stop
from allranks.runtime.checkpoint.directory import note_save
from allranks.runtime.checkpoint.saving import sync_directory
from allranks.runtime.checkpoint.schedule import AGREE_SECONDS, SaveSchedule, check_keep
from allranks.runtime.data.loader import Loader
from allranks.runtime.progress import advance
from allranks.runtime.seed import random_states, restore_random

if TYPE_CHECKING or "lightning" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger
else:
    from lightning_fabric.plugins.environments import ClusterEnvironment
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.loggers import Logger

if TYPE_CHECKING:
    from argparse import Namespace

    from lightning.pytorch import LightningModule, Trainer

    from allranks.runtime.context import Context

__all__ = ["AllranksEnvironment", "AllranksLogger", "ResumeCallback"]

#: In a checkpoint of Lightning's: what this module adds to it.
_KEY = "allranks"


class AllranksEnvironment(ClusterEnvironment):
    """The ranks of a context, however they were started.

    Without it Lightning looks at the variables of the scheduler itself, and on Slurm requeues the job when it is warned
    (``SLURMEnvironment(auto_requeue=True)``), as allranks does too.
    """

    def __init__(self, ctx: Context) -> None:
        super().__init__()
        self._ctx = ctx

    @property
    def creates_processes_externally(self) -> bool:
        """True: the ranks are there already."""
        return True

    @property
    def main_address(self) -> str:
        """The address at which the ranks meet."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The port at which the ranks meet."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Return whether this process was started by allranks."""
        return contract.RUN_ID in os.environ

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._ctx.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the ranks are there already."""

    def global_rank(self) -> int:
        """Return the rank."""
        return self._ctx.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the ranks are there already."""

    def local_rank(self) -> int:
        """Return the rank among those of this node."""
        return self._ctx.local_rank

    def node_rank(self) -> int:
        """Return the number of this node."""
        return self._ctx.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare the Trainer's arguments with the ranks that are there.

        Raises:
            RankError: they are of another number of ranks.
        """
        ranks, here = self._ctx.world_size, self._ctx.local_world_size
        if ranks % here:
            raise RankError(
                f"{here} ranks are on this node, of {ranks}",
                why="Lightning needs as many ranks on each node",
                fix="--nproc-per-node, and nodes that have so many GPUs",
            )
        if num_devices * num_nodes != ranks:
            raise RankError(
                f"the Trainer is for {num_devices * num_nodes} ranks and not for {ranks}",
                why=f"it has devices={num_devices} and num_nodes={num_nodes}",
                fix=f"Trainer(devices={here}, num_nodes={ranks // here}), "
                "or devices=ctx.local_world_size and num_nodes=ctx.world_size // ctx.local_world_size",
            )


class ResumeCallback(Callback):
    """Saves when the job is asked to stop, at the same step on all ranks, and ends the script to be continued.

    Requests to stop are those of :meth:`Checkpointer.step`: Ctrl-C, SIGTERM, the warning of a scheduler, the end of the
    job's time. The checkpoint is Lightning's own, with the random states of all ranks in addition. A training whose
    loader has a ``state_dict``, such as ``ctx.loader``, continues with the next batch. All ranks have to see the
    directory.

    Attributes:
        folder: directory of the checkpoints.
    """

    def __init__(
        self, ctx: Context, folder: str | Path | None = None, *, every: int | str | None = None, keep: int = 3
    ) -> None:
        """Use a directory for the checkpoints of this run.

        Args:
            ctx: the context of this rank.
            folder: directory of the checkpoints, created if missing; None: ``checkpoints`` in the run's directory.
            every: also save after so many steps (``500``) or so much time (``"10min"``).
            keep: number of newest checkpoints to keep.

        Raises:
            RankError: ``every`` or ``keep`` is invalid.
        """
        super().__init__()
        check_keep(keep)
        self.folder = Path(folder) if folder else ctx.run_dir / "checkpoints"
        self._ctx = ctx
        self._keep = keep
        self._schedule = SaveSchedule(every)
        self._loaded: dict[str, Any] | None = None  # of the checkpoint that the training resumes from
        self._step = 0
        self._postponed = self._leaving = False

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint, for ``trainer.fit(ckpt_path=...)``; None if there is none. All ranks read it."""
        names = [str(path) for path in self._saved()] if self._ctx.is_main else []
        newest = self._ctx.control.broadcast(names[-1:])
        return Path(newest[0]) if newest else None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the random states of all ranks to a checkpoint, and the position of a loader of the context."""
        loader = trainer.train_dataloader
        checkpoint[_KEY] = {
            "random": self._ctx.control.gather(random_states(self._ctx.device)),
            "loader": loader.state_dict() if isinstance(loader, Loader) else None,
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read what :meth:`on_save_checkpoint` has added to a checkpoint."""
        self._loaded = checkpoint.get(_KEY)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen for requests to stop."""
        _listen()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue where the checkpoint was taken, and listen for requests to stop."""
        _listen()
        ctx, loader = self._ctx, trainer.train_dataloader
        ctx.progress.step = self._step = trainer.global_step
        self._schedule.start(self._step)
        if ctx.is_main:
            note_save(None, self._step)
            for rest in self.folder.glob(".step-*.tmp"):  # of a process that was killed while it saved
                _remove(rest)
            if isinstance(loader, Loader) and loader.is_stream:
                log("warning: of a stream Lightning reads a batch ahead: a resume leaves that out")
        loaded, self._loaded = self._loaded, None
        if loaded is None or not trainer.ckpt_path:
            return
        # Lightning numbers its records by the steps before them, each of several optimizers counting for one step.
        ctx.metrics.resume(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", self._step - 1))
        if isinstance(loader, Loader) and not loader.is_stream and loaded["loader"]:
            loader.load_state_dict(loaded["loader"])  # At the end of an epoch Lightning does not.
        if len(loaded["random"]) == ctx.world_size:
            restore_random(loaded["random"][ctx.rank], ctx.device)
        if ctx.is_main:
            log(f"continuing from step {self._step}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if that is due, or if the job is asked to stop."""
        advance()
        if trainer.global_step == self._step:
            return  # In the middle of an effective batch: a checkpoint has no gradients.
        self._step = self._ctx.progress.step = trainer.global_step
        if self._step >= self._schedule.next:
            # A resume from here would leave out the validation, or the end of the epoch, that follows.
            self._postponed = _is_followed(trainer, batch_idx) and not self._postponed
            if not self._postponed:
                self._agree(trainer)

    # After a batch Lightning logs its metrics, and then calls one of these.

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Exit if the job was asked to stop, and has saved: with code 75, to be continued."""
        self._leave()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exit likewise."""
        self._leave()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exit likewise."""
        self._leave()

    def _leave(self) -> None:
        if self._leaving:
            self._ctx.progress.stopping = True
            raise SystemExit(contract.CONTINUE_LATER)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, unless it is already saved."""
        if self._step > self._schedule.saved_step:
            self._save(trainer, leaving=False)

    def _agree(self, trainer: Trainer) -> None:
        reason = stop.requested()
        schedule = self._schedule
        mine = (reason is not None, schedule.is_time(), schedule.microseconds_per_step(self._step))
        stopping, any_due, microseconds = self._ctx.control.agree(*map(int, mine))
        if stopping or any_due or schedule.is_due(self._step):
            self._save(trainer, leaving=bool(stopping))
        if stopping:
            report_stop(self._ctx, reason, f"saved {self._target()}")
            self._leaving = True
        schedule.plan(self._step, microseconds, AGREE_SECONDS)

    def _save(self, trainer: Trainer, *, leaving: bool) -> None:
        target = self._target()
        temporary = self.folder / f".{target.name}.tmp"
        self.folder.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(temporary)
        if self._ctx.is_main:
            _sync(temporary)
            temporary.replace(target)
            sync_directory(self.folder)
            note_save(target, self._step, leaving=leaving)
            for old in self._saved()[: -self._keep]:
                _remove(old)
        self._ctx.control.barrier()
        self._schedule.note_save(self._step)

    def _target(self) -> Path:
        """Return where a checkpoint of the current step is saved."""
        return self.folder / f"step-{self._step:09d}.ckpt"

    def _saved(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*.ckpt"))


def _listen() -> None:
    """Listen for requests to stop, in place of Lightning."""
    if threading.current_thread() is threading.main_thread():
        # Lightning's handler sends a message to the other ranks from within the signal, in the middle of any other.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stop.listen()


def _is_followed(trainer: Trainer, batch_idx: int) -> bool:
    """Return whether validation, or the end of the epoch, follows this batch."""
    every = trainer.val_check_batch
    number = trainer.fit_loop.total_batch_idx if trainer.check_val_every_n_epoch is None else batch_idx
    return bool(trainer.is_last_batch or (every and (number + 1) % every == 0))


def _sync(saved: Path) -> None:
    """Flush a checkpoint to disk: a file, or a directory of the parts of all ranks."""
    for path in [saved, *saved.rglob("*")]:
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class AllranksLogger(Logger):
    """Writes what a module logs to the run's ``metrics.jsonl``, and to the context's trackers."""

    def __init__(self, ctx: Context) -> None:
        super().__init__()
        self._ctx = ctx
        self._metrics = ctx.metrics  # Made now, since it closes the file when the context is closed.
        self._last = (0, 0.0)  # the newest step and its time

    @property
    def save_dir(self) -> str:
        """The run's directory: Lightning's own callbacks write to ``lightning/0`` in it."""
        return str(self._ctx.run_dir)

    @property
    def name(self) -> str:
        """The name of the directory."""
        return "lightning"

    @property
    def version(self) -> str:
        """The same in all attempts, so that callbacks find what they have written."""
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write metrics of a step, with the steps per second since the last ones."""
        if not self._ctx.is_main:
            return
        now = time.time()
        at = self._ctx.progress.step if step is None else step
        values: dict[str, Any] = {name: value for name, value in metrics.items() if name != "step"}
        before, began = self._last
        if at > before:
            if began:
                values["steps_per_second"] = round((at - before) / (now - began), 3)
            self._last = (at, now)
        self._metrics.write(at, values)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Pass hyperparameters to the trackers that show them."""
        self._metrics.config(params if isinstance(params, dict) else vars(params))
