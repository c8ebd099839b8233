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
    """One rank of a running job, and the building blocks of a training loop.

    :func:`allranks.init` returns it, for a ``with`` statement. Each block works on its own beside plain PyTorch.

    Attributes:
        precision: precision of the operations under :meth:`autocast`.
        deterministic: whether only deterministic algorithms are used.
        log_every: number of optimizer steps between two records of :attr:`metrics`.
        trackers: what ``init`` got as ``trackers``.
    """

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    deterministic: bool = False
    log_every: int = 50
    trackers: tuple[str | Tracker, ...] = field(default=(), repr=False)

    @cached_property
    def metrics(self) -> Metrics:
        """Metrics of the training: averaged over samples and ranks, and written by rank 0."""
        from allranks.runtime.metrics import Metrics

        made = Metrics(self, trackers=lambda: self._tracker_group, log_every=self.log_every, store=self._store)
        # The last to be closed: what is closed before may still record something.
        self.closing.insert(0, made.finish)
        return made

    def on_main(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on rank 0 only, while the other ranks wait; all ranks call this and get its result.

        The other ranks wait without a collective operation, so a long evaluation runs into no timeout. Collective
        operations do not work inside the function: use the model without its data parallel wrapper, see
        :meth:`unwrap`.

        Args:
            fn: function that rank 0 runs.
            args: positional arguments of the function.
            kwargs: keyword arguments of the function.

        Returns:
            The result of the function. Other ranks get a copy, with tensors of rank 0's GPU on their own device.

        Raises:
            RankError: on other ranks, if rank 0 failed or died, or another rank continued with its steps instead; on
                all ranks, if the result holds anything but numbers, strings, bytes, tensors, lists, tuples, sets and
                dicts.
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
        """Move a model to this rank's device and make it data parallel, with rank 0's weights on all ranks.

        With every strategy, ``loss.backward()`` averages the gradients over the ranks. In a world of one rank the model
        itself is returned.

        Args:
            module: the model, built the same way on all ranks.
            strategy: ``"flat"`` keeps all gradients in one buffer; it averages large ones as soon as they are computed
                and all others in one message at the end of the backward pass. ``"ddp"`` is torch's
                DistributedDataParallel with gradients as views of its buckets. ``"fsdp"`` is torch's fully_shard, for
                models whose gradients and optimizer state do not fit beside the parameters; the parameters alone must
                fit on each device at the start. ``"auto"`` is flat on CPUs up to 64 MiB of gradients and if
                ``deterministic``; otherwise, and for sparse gradients, ddp.
            static_graph: for ddp: each step uses the same parameters in the same order; some may never be used. No
                effect with other strategies or if ``deterministic``.
            find_unused_parameters: allow parameters without a gradient in some steps, as in models with branches.
                Those that no rank used keep ``grad=None``. If False, several ranks fail with an error that names
                them. With fsdp, all ranks must use the same parameters in the same step, or torch fails or hangs.
            checkpoint_activations: classes of modules whose activations are recomputed in the backward pass instead of
                kept: less memory, about a third more computation.
            compile: compile the model in place with ``torch.compile``: True, or a mode such as ``"max-autotune"``.
            channels_last: use the channels-last memory format, which is faster for convolutions of 4-D inputs.
            compress: send gradients in this type. It halves the traffic and rounds the gradients.
            shard: for fsdp: classes of modules that are gathered and freed one at a time, such as a transformer block.

        Returns:
            The model to train; its parameters go to :meth:`optimizer`.

        Raises:
            RankError: the model has no parameters to train, differs between ranks, or is already wrapped; a class
                named here does not occur in it; or the strategy or type is unknown.
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
        """Return the model without its data parallel wrapper; in a world of one rank, the model itself.

        Its forward pass needs no other rank, so it can run in :meth:`on_main`. A sharded model stays sharded, and needs
        all ranks.

        Args:
            model: the result of :meth:`prepare`.
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
        """Make an optimizer that steps once per effective batch, fused if torch can.

        ``step()`` and ``zero_grad()`` do nothing between the micro-batches of :meth:`accumulate`;
        ``ctx.progress.stepped`` is True if the last ``step()`` made a step, for a scheduler that counts steps. With
        fp16, a step whose gradients overflowed changes nothing, and counts. The first optimizer of a context counts
        ``ctx.progress.step``.

        Args:
            cls: class of the optimizer, such as ``torch.optim.AdamW``; or an optimizer that the script has made of all
                parameters of the model, without a scheduler yet. The latter becomes an optimizer of this context as it
                is: not fused unless it was made so.
            model: the result of :meth:`prepare`, whose parameters are trained; or parameters, or groups of them.
            clip_norm: maximum norm of all gradients together; larger ones are scaled down, as by
                ``torch.nn.utils.clip_grad_norm_``.
            scale_lr: multiply ``lr``, which is then meant for one rank, by the number of ranks (``"linear"``, Goyal et
                al. 2017, arXiv:1706.02677) or by its square root (``"sqrt"``, Krizhevsky 2014, arXiv:1404.5997).
            options: arguments of the class, such as ``lr`` and ``weight_decay``; ``fused`` and ``foreach`` are passed
                on as given.

        Returns:
            An instance of ``cls``, which schedulers accept. With ``clip_norm``, its ``grad_norm`` is the norm of the
            last step's gradients before they were clipped.

        Raises:
            RankError: there are no parameters, or no ``lr`` to scale; ``scale_lr`` is unknown; or the optimizer has
                other parameters than the model, or already has a scheduler.
        """
        from allranks.runtime.model.optimizer_factory import Asked

        made: OptimizerT = self._training.optimizer(cls, model, Asked(clip_norm, scale_lr, options))
        return made

    @property
    def scaler(self) -> Scaler:
        """The gradient scaler, a ``torch.amp.GradScaler``: active with ``precision="fp16"`` only."""
        return self._training.scaler

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a ``with`` block in which torch computes in the context's precision; it does nothing with fp32."""
        return self._training.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss that is a mean over this rank's micro-batch.

        It weights the loss so that the gradients are the mean over all samples of the effective batch, even if ranks
        and micro-batches have different sizes, and scales it with fp16. If all batches have the same size and there
        is neither accumulation nor fp16, ``loss.backward()`` does the same; otherwise ``optimizer.step()`` refuses it.

        Args:
            loss: a tensor of one number.
        """
        self.metrics.begin_step()
        self._training.backward(loss)

    def accumulate(self, model: nn.Module, steps: int) -> AbstractContextManager[None]:
        """Return a ``with`` block for the forward and backward pass of one of ``steps`` micro-batches.

        Ranks exchange gradients in the last micro-batch only. The last effective batch of an epoch ends with the epoch,
        so it may have fewer micro-batches.

        If the loop leaves an effective batch early, for example by ``break``, the next blocks complete it. Its
        gradients are dropped instead when the :class:`Loader` starts the next epoch or loads a state, or when a block
        with other ``steps`` begins. A block that an exception leaves counts as a micro-batch.

        Args:
            model: the result of :meth:`prepare`.
            steps: number of micro-batches in an effective batch.

        Raises:
            RankError: ``steps`` is not a positive number.
        """
        self.metrics.begin_step()
        return self._training.accumulate(model, steps)

    def close(self) -> None:
        """Complete what is being written, wait for the other ranks and leave the process group.

        The end of the ``with`` block calls it. Without ``with``, call it on all ranks, at a point that all of them
        reach; after an error in one rank, let the exception end the script instead. Calling it again does nothing. A
        process group that the script had started itself stays open.

        Raises:
            RankError: another rank continues with its steps.
            SystemExit: with code 75, "continue me later": the job was asked to stop, and has saved.
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
        """Leave the process group without waiting for other ranks, because this rank has failed.

        An exception that leaves the ``with`` block calls it.
        """
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
                read from ``ALLRANKS_END_TIME`` or ``SLURM_JOB_END_TIME``, in seconds since 1970.
            save_at_end: save when the context is closed, unless the last step is already saved; not after an error.
            parts: what to save, by name: models, optimizers, loaders, schedulers, or anything with ``state_dict`` and
                ``load_state_dict``. Values that are not tensors are taken from rank 0.

        Raises:
            RankError: the directory is not writable; an argument is invalid; it was already called; or the newest
                complete checkpoint is of another model (the error names the keys, and nothing was loaded).
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
        """Directory of the run, the same in all its attempts; without ``allranks run``, the working directory."""
        return Path(os.environ.get(contract.RUN_DIR, "."))

    @property
    def stopping(self) -> bool:
        """True once the job was asked to stop and has saved. Loops of the script's own end when it is True."""
        return self.progress.stopping
