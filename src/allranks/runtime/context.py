"""What a training script holds: the rank, and the pieces of a training loop."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from allranks import contract
from allranks.errors import RankError
from allranks.runtime.main_rank import MainRank
from allranks.runtime.reader import Reader
from allranks.runtime.watch_steps import StepWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    import torch
    from torch import nn
    from torch._C._distributed_c10d import Store

    from allranks.runtime.checkpoint import Checkpointer
    from allranks.runtime.metrics import Metrics
    from allranks.runtime.model import Training
    from allranks.runtime.model.precision import Scaler
    from allranks.runtime.trackers import Tracker, TrackerGroup

    OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Context(Reader):
    """One rank of a running job, and the pieces of a training loop. Made by :func:`allranks.init`, used with ``with``.

    Each piece works by itself beside plain PyTorch. What a piece does is said where it is made.
    """

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    deterministic: bool = False
    log_every: int = 50
    trackers: tuple[str | Tracker, ...] = field(default=(), repr=False)

    @cached_property
    def metrics(self) -> Metrics:
        """What the training logs: means over samples and ranks, and where rank 0 writes them."""
        from allranks.runtime.metrics import Metrics

        made = Metrics(self, trackers=lambda: self._tracker_group, log_every=self.log_every, store=self._store)
        # The last to be closed: what is closed before may still record something.
        self.closing.insert(0, made.finish)
        return made

    def on_main(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on rank 0 only, while the others wait for it; all ranks call this, and get its value.

        The others wait without a collective operation, so that no timeout ends a long evaluation. In the function,
        rank 0 is alone: no collective operation works there, so use the model without its data parallel wrapper.

        Args:
            fn: what rank 0 runs.
            args: of the function.
            kwargs: of the function.

        Returns:
            What it returned: on the other ranks a copy, whose tensors of rank 0's GPU are on this rank's.

        Raises:
            RankError: on the other ranks: rank 0 failed in it, or is gone; or a rank goes on with its steps instead.
                On all: the value is not made of numbers, texts, bytes, tensors, lists, tuples, sets and dicts.
        """
        return self._main.on_main(fn, args, kwargs)

    @cached_property
    def _tracker_group(self) -> TrackerGroup:
        from allranks.runtime.trackers import open_trackers

        return open_trackers(self.trackers)

    @cached_property
    def _main(self) -> MainRank:
        from allranks.runtime.parcel import Parcels

        return MainRank(self.rank, self.world_size, self._store, Parcels(self.restart, self.device), self._watch)

    @cached_property
    def _watch(self) -> StepWatch:
        return StepWatch(self.rank, self.world_size, self.progress, self._store)

    @property
    def _store(self) -> Store | None:
        return None if self._membership is None else self._membership.store

    def _start_trackers(self) -> None:
        """Open what the user chose, before the training begins; an error of rank 0 ends all ranks."""

        def open_on_main() -> None:
            assert self._tracker_group is not None

        if self.trackers:
            self._main.run("trackers", open_on_main, "allranks.init(trackers=...)")

    @cached_property
    def _training(self) -> Training:
        from allranks.runtime.model import Training

        return Training(self)

    def prepare(
        self,
        module: nn.Module,
        *,
        strategy: Literal["auto", "ddp", "flat", "fsdp"] = "auto",
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        checkpoint_activations: Iterable[type[nn.Module]] = (),
        compile: bool | str = False,
        channels_last: bool = False,
        compress: Literal["bf16", "fp16"] | None = None,
        shard: Iterable[type[nn.Module]] = (),
    ) -> nn.Module:
        """Put a model on this rank's device and make it data parallel, with the weights of rank 0 on all ranks.

        In a world of one the model itself comes back. ``loss.backward()`` averages the gradients over the ranks,
        whichever strategy it is.

        Args:
            module: the model, made alike on all ranks.
            strategy: ``"flat"`` keeps all gradients in one buffer, and averages large ones as soon as they are there
                and all others in one message at the end of the backward pass; ``"ddp"`` is torch's
                DistributedDataParallel with gradients as views of its buckets;
                ``"fsdp"`` is torch's fully_shard, for models whose gradients and optimizer state do not fit beside
                the parameters; those alone must fit on each device at the start. ``"auto"`` takes flat on CPUs up to
                64 MiB of gradients, and where ``deterministic``; else, and for sparse gradients, ddp.
            static_graph: for ddp: each step uses the same parameters in the same order, and some perhaps never. It
                has no effect elsewhere, nor where ``deterministic``.
            find_unused_parameters: parameters may get no gradient in some steps, as in models with branches. What
                no rank used keeps ``grad=None``. Otherwise that is an error in a world of several, which names them.
                With fsdp, all ranks have to use the same parameters in the same step: torch fails or hangs if not.
            checkpoint_activations: classes of modules whose activations are not kept but computed again in the
                backward pass: less memory, about a third more computing.
            compile: with ``torch.compile``, in place, or its mode, as ``"max-autotune"``.
            channels_last: the memory format that convolutions of four-dimensional inputs like best.
            compress: send gradients in this type. It halves the traffic and rounds the gradients.
            shard: for fsdp: classes of modules that are gathered and freed one by one, as a transformer's block.

        Raises:
            RankError: the model has nothing to train, differs between ranks, or is wrapped already; a class that is
                named here does not occur in it; there is no such strategy or type.
        """
        from allranks.runtime.model.preparing import Options

        options = Options(
            strategy=strategy,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            checkpoint_activations=tuple(checkpoint_activations),
            compile=compile,
            channels_last=channels_last,
            compress=compress,
            shard=tuple(shard),
        )
        self._watch.start()
        return self._training.prepare(module, options)

    @staticmethod
    def unwrap(model: nn.Module) -> nn.Module:
        """Give the model inside of what :meth:`prepare` gave; in a world of one it is the model itself.

        Its forward pass needs no other rank, for :meth:`on_main`; a sharded model stays sharded, and does.

        Args:
            model: what :meth:`prepare` gave.
        """
        from allranks.runtime.model import unwrap

        return unwrap(model)

    def optimizer(
        self,
        cls: type[OptimizerT] | OptimizerT,
        model: nn.Module | Iterable[Any],
        *,
        clip_norm: float | None = None,
        scale_lr: Literal["linear", "sqrt"] | None = None,
        **options: Any,
    ) -> OptimizerT:
        """Make an optimizer whose step is fused where torch can, and comes once per effective batch.

        The object is a ``cls``, for schedulers and everything else. ``step()`` and ``zero_grad()`` do nothing
        between the micro-batches of :meth:`accumulate`; ``ctx.progress.stepped`` says whether the last ``step()``
        was one, for a scheduler that counts steps. With fp16, a step whose gradients overflowed changes nothing, and
        counts. The first optimizer of a context counts ``ctx.progress.step``.

        Args:
            cls: the class of the optimizer, as ``torch.optim.AdamW``; or an optimizer that the script has made of
                all parameters of the model, without a scheduler yet. It becomes one of this context, as it is: not
                fused unless it was made so.
            model: what :meth:`prepare` gave, whose parameters are trained, or parameters or groups of them.
            clip_norm: the greatest norm that all gradients together may have; longer ones are scaled down, as
                ``torch.nn.utils.clip_grad_norm_`` does. The norm before is ``optimizer.grad_norm``.
            scale_lr: ``lr`` is meant for one rank, and multiplied with the number of ranks (``"linear"``, Goyal et
                al. 2017, arXiv:1706.02677) or its square root (``"sqrt"``, Krizhevsky 2014, arXiv:1404.5997).
            options: of the class: ``lr``, ``weight_decay``, ... ``fused`` and ``foreach`` are left as given.

        Raises:
            RankError: there are no parameters, or no ``lr`` to scale; there is no such ``scale_lr``; the optimizer
                has other parameters than the model, or a scheduler.
        """
        from allranks.runtime.model.optimizing import Asked

        made: OptimizerT = self._training.optimizer(cls, model, Asked(clip_norm, scale_lr, options))
        return made

    @property
    def scaler(self) -> Scaler:
        """What scales gradients with ``precision="fp16"``, and does nothing otherwise; it has a ``state_dict``."""
        return self._training.scaler

    def autocast(self) -> AbstractContextManager[Any]:
        """Give a block in which torch computes in the context's precision; with fp32 it does nothing."""
        return self._training.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss that is a mean over this rank's micro-batch.

        The loss is weighted so that the gradients become the mean over all samples of the effective batch, over
        ranks and micro-batches of whatever size, and scaled with fp16. Where batches are equally large, nothing is
        accumulated and nothing scaled, ``loss.backward()`` does the same; elsewhere ``optimizer.step()`` says so.
        """
        self.metrics.begin_step()
        self._training.backward(loss)

    def accumulate(self, model: nn.Module, steps: int) -> AbstractContextManager[None]:
        """Give the block around the forward and backward pass of one of ``steps`` micro-batches.

        Ranks exchange gradients in the last one only. The last effective batch of an epoch ends with the epoch, and
        may have fewer micro-batches.

        One that is left before it is full, as by a ``break``, is completed by the next blocks. Its gradients are
        forgotten instead when :meth:`loader` goes on with the next epoch or gets a state, or when blocks with other
        ``steps`` begin. A block that an exception leaves counts as a micro-batch.

        Args:
            model: what :meth:`prepare` gave.
            steps: micro-batches in an effective batch.

        Raises:
            RankError: ``steps`` is no positive number.
        """
        self.metrics.begin_step()
        return self._training.accumulate(model, steps)

    def close(self) -> None:
        """Leave the process group, after waiting for the other ranks. Calling it again does nothing.

        A group that the script had started itself before ``init`` stays as it is. Call it on all ranks and
        at a point that all of them reach; after an error in one rank, leave by the exception instead.
        What goes on in the background, such as writing a checkpoint or metrics, is completed before.

        Raises:
            RankError: another rank goes on with its steps.
            SystemExit: 75, "continue me later": the job was asked to stop, and has saved.
        """
        if self._closed:
            return
        if "metrics" in vars(self) or (self.is_main and self.world_size > 1):
            self.metrics.hand_over()
        try:
            self._watch.leave(self.timeout)
        except RankError:
            self.abandon()
            raise
        super().close()
        if self.stopping:
            raise SystemExit(contract.CONTINUE_LATER)

    def abandon(self) -> None:
        """Leave without waiting for anybody, because this rank has failed; see :meth:`Member.abandon`."""
        self._watch.stop()
        if "metrics" in vars(self):
            self.metrics.flush()
        super().abandon()

    def checkpoints(
        self,
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
        """Continue from the newest whole checkpoint in a folder, and save there from now on.

        Call it when everything that is to be saved is made, on all ranks, and ``step()`` of what it gives at the end
        of each step of the loop. Saved are the parts, the number of steps, the scale of fp16 gradients, metrics, the
        random states of all ranks and ``config``. A checkpoint is written aside in the background, checked by
        checksums, and counts once all of it is on disk; only the copying of the state into memory stops the loop,
        which takes as much memory again. Loading verifies it: a damaged one is named and skipped. Another number of
        ranks can continue from it, also with sharded models.

        SIGTERM, the first Ctrl-C or SIGHUP and the end of the job's time are requests to stop from here on, SIGUSR1
        and SIGUSR2 also if they came since :func:`allranks.init`: see :meth:`Checkpointer.step`. A context has one of
        these at a time.

        Args:
            folder: of the checkpoints, made if it is not there. It is one job's own: :attr:`run_dir` ``/
                "checkpoints"`` is continued by ``allranks resume`` and when a scheduler starts the job again, and not
                by another run.
            keep: how many of the newest stay.
            best: keep also the one with the best metric: ``"loss:min"``, ``"accuracy:max"``. The metric is given to
                ``save(metric)`` or ``step(metric)``.
            every: save after so many steps (``500``, ``"500 steps"``) or so much time (``"10min"``, ``"1h"``). None:
                only by ``save()`` and when the job is asked to stop.
            resume: continue from what is there; False begins anew, beside it: what is there is neither removed nor
                replaced, and not counted by ``keep`` and ``best``.
            config: plain values that are to be found in the checkpoint, as hyperparameters.
            background: False makes each save wait until it is durable.
            leave_before: how long before the end of the job's time to save and leave, as ``"90 s"``. The end is in
                ``ALLRANKS_END_TIME`` or ``SLURM_JOB_END_TIME``, in seconds since 1970.
            save_at_end: save when the context is closed, unless the last step is saved already; not after an error.
            parts: what to save, by name: models, optimizers, loaders, schedulers, or anything with ``state_dict`` and
                ``load_state_dict``. What is no tensor in them is taken from rank 0.

        Raises:
            RankError: the folder cannot be written; an argument makes no sense; it was called before; the newest
                whole checkpoint is of another model: it names the keys, and nothing was loaded.
        """
        from allranks.runtime.checkpoint import make_checkpointer

        return make_checkpointer(
            self,
            folder,
            keep=keep,
            best=best,
            every=every,
            resume=resume,
            config=config,
            background=background,
            leave_before=leave_before,
            save_at_end=save_at_end,
            parts=parts,
        )

    @property
    def run_dir(self) -> Path:
        """The run's own folder, the same in each of its attempts; without ``allranks run``, the working directory."""
        return Path(os.environ.get(contract.RUN_DIR, "."))

    @property
    def stopping(self) -> bool:
        """Whether the job was asked to stop and has saved; loops of the script's own look at it and end."""
        return self.progress.stopping
