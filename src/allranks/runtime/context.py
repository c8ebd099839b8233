"""What a training script holds: the rank, and the building blocks of a training loop."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from allranks import contract
from allranks.errors import RankError
from allranks.runtime.batch import positive
from allranks.runtime.exchange import CpuGroup, MainRank, SignedValues
from allranks.runtime.peers import ALL_LEFT, Peers, StepWatch
from allranks.runtime.progress import Progress
from allranks.runtime.steptime import EXCHANGE
from allranks.system.processes import let_gloo_rest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from types import TracebackType

    import torch
    from torch import nn
    from torch._C._distributed_c10d import Store
    from typing_extensions import Self

    from allranks.runtime.checkpoint.checkpointer import Checkpointer
    from allranks.runtime.data import EvaluationLoader, Loader
    from allranks.runtime.metrics import Metrics
    from allranks.runtime.model import TrainingState
    from allranks.runtime.model.optimizer import Scaler
    from allranks.runtime.trackers import Tracker, TrackerGroup

    OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

P = ParamSpec("P")
T = TypeVar("T")
#: Rank 0 serves the store and leaves last, but it does not wait longer than this for the others.
_LAST_LEAVE = timedelta(seconds=60)


@dataclass(frozen=True)
class Membership:
    """The store of the process group; whether this rank serves it; whether we made the group.

    ``on_close`` is called once, when the context has been closed.
    """

    store: Store
    serves: bool
    ours: bool
    on_close: Callable[[], None]


@dataclass(frozen=True)
class Context:
    """One rank of a running job, and the building blocks of a training loop.

    :func:`allranks.init` returns it, for a ``with`` statement. Each block works on its own beside plain PyTorch.

    Attributes:
        rank: number of this rank, from 0.
        local_rank: number of this rank on its node, from 0.
        world_size: number of ranks.
        local_world_size: number of ranks on this node.
        node_rank: number of this node, from 0.
        device: device of this rank.
        backend: backend of the process group.
        environment: what identified the rank: torchrun (also for ``allranks run``), Slurm, PBS, Open MPI, MPICH or
            single process.
        master_addr: host of rank 0.
        restart: number of times that the ranks were restarted in this allocation.
        seed: seed of the job, the same on all ranks; None if ``init`` got ``seed=None``.
        rank_seed: seed of this rank's random generators; None likewise.
        timeout: how long ranks wait for each other.
        precision: precision of the operations under :meth:`autocast`.
        deterministic: whether only deterministic algorithms are used.
        log_every: number of optimizer steps between two records of :attr:`metrics`.
        trackers: what ``init`` got as ``trackers``.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str
    environment: str
    master_addr: str
    restart: int = 0
    seed: int | None = None
    rank_seed: int | None = None
    timeout: timedelta = timedelta(seconds=600)
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    deterministic: bool = False
    log_every: int = 50
    trackers: tuple[str | Tracker, ...] = field(default=(), repr=False)
    _membership: Membership | None = field(default=None, repr=False)
    #: What to call when the context is closed, on all ranks and while they still have each other; last in, first out.
    closing: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _closed: list[bool] = field(default_factory=list, repr=False)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes what is needed only once."""
        return self.rank == 0

    @property
    def terminal(self) -> bool:
        """True if the output is shown on a terminal, so that a progress bar on stderr makes sense."""
        watched = os.environ.get(contract.TERMINAL)
        return watched == "1" if watched else sys.stderr.isatty()

    @cached_property
    def progress(self) -> Progress:
        """Position in the training: the number of steps done, and the size of the current batch."""
        return Progress()

    @cached_property
    def control(self) -> CpuGroup:
        """Small messages between ranks, over the CPU. Reading it the first time is collective."""
        return CpuGroup(self.world_size, self.timeout, self.progress.clock)

    def print(self, *values: object) -> None:
        """Print a line on rank 0 only, and flush it. Ranks need not all call it."""
        if self.is_main:
            sys.stdout.write(" ".join(map(str, values)) + "\n")
            sys.stdout.flush()

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        from torch import distributed

        with self.progress.clock.during(EXCHANGE):
            distributed.barrier()

    def sum(self, *values: float) -> list[float]:
        """Sum each number over all ranks, in double precision, with one message for all of them.

        For a mean, sum the values and their count, and divide: that is right also if ranks have different numbers of
        samples.

        Args:
            values: numbers of this rank; as many on each rank.

        Returns:
            The sums, on all ranks.
        """
        import torch
        from torch import distributed

        # Apple's GPUs have no double precision.
        device = torch.device("cpu") if self.device.type == "mps" else self.device
        total = torch.tensor(values, dtype=torch.float64, device=device)
        with self.progress.clock.during(EXCHANGE):
            distributed.all_reduce(total)
        return [float(value) for value in total.tolist()]

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

    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        workers: int | Literal["auto"] = "auto",
        pin_memory: bool | None = None,
        prefetch: int = 2,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        drop_last: bool = False,
        fetch: Literal["auto", "item"] = "auto",
        sharded: bool = False,
        quiet: bool = False,
    ) -> Loader:
        """Return a loader for training: it yields this rank's part of each batch, on this rank's device.

        All ranks call it with the whole dataset. The order of samples depends only on seed, epoch and the length of the
        dataset, and the position is counted in samples. So each sample comes exactly once in an epoch (unless
        ``drop_last`` drops it), with any number of ranks and workers, and however often the training is stopped and
        resumed, even on another number of ranks. If the last batch of an epoch has fewer samples than there are ranks,
        some ranks get one sample as a filler: ``ctx.progress.samples`` is 0 then, and ``ctx.backward`` and
        ``ctx.metrics`` ignore it.

        Random numbers that ``dataset[i]`` draws from ``random``, ``numpy.random`` or torch's default CPU generator
        depend only on seed, epoch and ``i``, and do not change the training's own. The first batch that draws some is
        fetched twice.

        Each rank reads a stream (a torch ``IterableDataset``, or anything with only ``__iter__``) completely; the same
        guarantees hold if the stream is the same each time. It is not shuffled.

        Args:
            dataset: anything with ``__getitem__`` and ``__len__``, or a stream.
            batch_size: number of samples in a batch on each rank.
            global_batch_size: number of samples in a batch over all ranks; give this or ``batch_size``.
            shuffle: False keeps the dataset's order.
            seed: seed of order and augmentation; default: the context's, else 0.
            workers: number of processes on each rank that fetch batches; with 0 the rank itself does. ``"auto"``: the
                number of CPUs that the rank has for itself, minus one; at most one for a stream; none for a
                ``TensorDataset`` and for a dataset that fetches lists of samples (``__getitems__``).
            pin_memory: copy batches to the GPU through pinned memory; default: if the device is a GPU.
            prefetch: number of batches that each worker keeps ready.
            collate_fn: makes a batch of a list of samples; default: torch's ``default_collate``.
            worker_init_fn: called in each worker with its number.
            drop_last: drop the samples at the end of an epoch that do not fill a batch.
            fetch: ``"item"`` calls ``dataset[i]`` for each sample, even if the dataset can fetch lists of samples,
                whose random numbers are seeded once per list.
            sharded: for streams: the dataset yields each rank a part of its own. The epoch ends on all ranks when the
                first rank has no more samples; the ranks agree on that in each step, and a resume skips as many
                batches.
            quiet: do not print the batch size.

        Raises:
            RankError: the dataset is empty or has fewer samples than there are ranks; the global batch size is not
                divisible by the number of ranks; the ranks disagree on any of this; or a value is invalid.
        """
        from allranks.runtime.data import LoaderOptions, make_loader

        chosen = (self.seed or 0) if seed is None else seed
        return make_loader(
            self,
            dataset,
            LoaderOptions(chosen, workers, pin_memory, prefetch, collate_fn, worker_init_fn, fetch),
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            sharded=sharded,
            quiet=quiet,
        )

    def evaluation_loader(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int | None = None,
        workers: int | Literal["auto"] = "auto",
        pin_memory: bool | None = None,
        prefetch: int = 2,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        fetch: Literal["auto", "item"] = "auto",
        same_steps: bool = True,
        whole: bool = False,
    ) -> EvaluationLoader:
        """Return a loader for evaluation: every sample exactly once over all ranks, in the dataset's order.

        No sample is repeated for padding, and all ranks have the same number of batches, so models that communicate in
        their forward pass can be evaluated too. Batches at the end may be smaller, or larger by one sample. While the
        loader is iterated, ``ctx.progress`` describes its batches, and afterwards the training's again. Random numbers
        are the same in each evaluation.

        Args:
            dataset: as for :meth:`loader`.
            batch_size: number of samples in a batch on each rank.
            seed: seed of random numbers that the dataset draws; default: the context's, else 0.
            workers: as for :meth:`loader`.
            pin_memory: as for :meth:`loader`.
            prefetch: as for :meth:`loader`.
            collate_fn: as for :meth:`loader`.
            worker_init_fn: as for :meth:`loader`.
            fetch: as for :meth:`loader`.
            same_steps: False lets some ranks have one batch less than others, as needed with fewer samples than ranks.
            whole: this rank gets all samples, for an evaluation on one rank alone.

        Raises:
            RankError: the dataset is empty, or has fewer samples than there are ranks.
        """
        from allranks.runtime.data import LoaderOptions, make_evaluation_loader

        chosen = (self.seed or 0) if seed is None else seed
        options = LoaderOptions(chosen, workers, pin_memory, prefetch, collate_fn, worker_init_fn, fetch)
        return make_evaluation_loader(self, dataset, options, batch_size=batch_size, same_steps=same_steps, whole=whole)

    @staticmethod
    def scaled_lr(
        lr: float, *, batch_size: int, base_batch_size: int, rule: Literal["linear", "sqrt"] = "linear"
    ) -> float:
        """Return the learning rate for a batch size, scaled from one that was tuned for another batch size.

        ``"linear"`` is ``lr * batch_size / base_batch_size``, for SGD, with a few epochs of warm-up if the factor is
        large (Goyal et al. 2017, arXiv:1706.02677, sections 2.1 and 2.2). ``"sqrt"`` is
        ``lr * sqrt(batch_size / base_batch_size)``, which keeps the variance of a step and is usual with Adam
        (Krizhevsky 2014, arXiv:1404.5997, section 5; Hoffer et al. 2017, arXiv:1705.08741, section 4). It needs no
        other rank.

        Args:
            lr: the learning rate tuned for ``base_batch_size``.
            batch_size: samples in an optimizer step: ``loader.global_batch_size`` times the accumulated micro-batches.
            base_batch_size: samples in an optimizer step for which ``lr`` was tuned.
            rule: ``"linear"`` or ``"sqrt"``.

        Raises:
            RankError: a value is invalid.
        """
        factor = positive("batch_size", batch_size) / positive("base_batch_size", base_batch_size)
        if not (isinstance(lr, (int, float)) and math.isfinite(lr) and lr >= 0):
            raise RankError(f"invalid learning rate: lr={lr!r}", fix="give a finite number from 0 on")
        if rule not in ("linear", "sqrt"):
            raise RankError(f"unknown rule {rule!r} for the learning rate", fix='rule="linear" or rule="sqrt"')
        return lr * (factor if rule == "linear" else math.sqrt(factor))

    @cached_property
    def metrics(self) -> Metrics:
        """Metrics of the training: averaged over samples and ranks, and written by rank 0."""
        from allranks.runtime.metrics import Metrics

        made = Metrics(self)
        # Closed last, because other blocks may still record something while they close.
        self.closing.insert(0, made.finish)
        return made

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
        from allranks.runtime.model.prepare import prepare
        from allranks.runtime.model.wrappers import PrepareOptions

        options = PrepareOptions(
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
        return prepare(self, module, options)

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
        made: OptimizerT = self._training.optimizer(cls, model, options=options, clip_norm=clip_norm, scale_lr=scale_lr)
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
        self.metrics.start_step()
        self._training.backward(loss)

    def accumulate(self, model: nn.Module, steps: int) -> AbstractContextManager[None]:
        """Return a ``with`` block for the forward and backward pass of one of ``steps`` micro-batches.

        Ranks exchange gradients in the last micro-batch only. The last effective batch of an epoch ends with the epoch,
        so it may have fewer micro-batches.

        If the loop leaves an effective batch early, for example by ``break``, the next blocks complete it. Its
        gradients are dropped instead when the :class:`Loader` starts the next epoch or loads a state, or when a block
        with other ``steps`` starts. A block that an exception leaves counts as a micro-batch.

        Args:
            model: the result of :meth:`prepare`.
            steps: number of micro-batches in an effective batch.

        Raises:
            RankError: ``steps`` is not a positive number.
        """
        self.metrics.start_step()
        return self._training.accumulate(model, steps)

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
                read from ``ALLRANKS_END_TIME`` or the scheduler's variable, such as ``SLURM_JOB_END_TIME``, in seconds
                since 1970.
            save_at_end: save when the context is closed, unless the last step is already saved; not after an error.
            parts: what to save, by name: models, optimizers, loaders, schedulers, or anything with ``state_dict`` and
                ``load_state_dict``. Values that are not tensors are taken from rank 0.

        Raises:
            RankError: the directory is not writable; an argument is invalid; it was already called; or the newest
                complete checkpoint is of another model (the error names the keys, and nothing was loaded).
        """
        from allranks.runtime.checkpoint.checkpointer import Checkpointer

        return Checkpointer(
            self,
            folder,
            parts,
            keep=keep,
            best=best,
            every=every,
            resume=resume,
            config=config,
            background=background,
            leave_before=leave_before,
            save_at_end=save_at_end,
        )

    @property
    def run_dir(self) -> Path:
        """Directory of the run, the same in all its attempts; without ``allranks run``, the working directory."""
        return Path(os.environ.get(contract.RUN_DIR, "."))

    @property
    def stopping(self) -> bool:
        """True once the job was asked to stop and has saved. Loops of the script's own end when it is True."""
        return self.progress.stopping

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
        while self.closing:
            self.closing.pop()()
        if "control" in vars(self):
            self.control.release()  # It holds the process group.
        self._mark_closed()
        if (membership := self._membership) is not None:
            from torch import distributed

            # A model of DistributedDataParallel outlives the group, and ends it with the interpreter's lock held: torch
            # 2.13 hangs if a thread of gloo's waits for that lock then. This goes for a group of the script's own too.
            let_gloo_rest()
            if membership.ours and distributed.is_initialized():
                distributed.destroy_process_group()
            # If the store is gone, the rank that served it has failed; that rank's own error is the one to see.
            with suppress(distributed.DistError):
                if membership.store.add("left", 1) == self.world_size:
                    membership.store.set(ALL_LEFT, "1")
                elif membership.serves:
                    membership.store.wait([ALL_LEFT], _LAST_LEAVE)
        if self.stopping:
            raise SystemExit(contract.CONTINUE_LATER)

    def abandon(self) -> None:
        """Leave the process group without waiting for other ranks, because this rank has failed.

        An exception that leaves the ``with`` block calls it.
        """
        self._watch.stop()
        if "metrics" in vars(self):
            self.metrics.flush()
        if self._closed:
            return
        self._mark_closed()
        if self._membership is None or not self._membership.ours:
            return
        from torch import distributed

        if distributed.is_initialized():
            # Destroying a group waits for operations in flight, which never end if this rank took part in them and
            # the others wait for it. NCCL can abort. Gloo cannot (seen with torch 2.13: abort, destroy and the
            # destructor all wait for the other side), so the group stays until the process exits.
            abort = getattr(distributed.distributed_c10d, "_abort_process_group", None)
            if "nccl" in self.backend and abort is not None:
                abort()
            else:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(distributed.group.WORLD))
        Peers(self.rank, self.world_size, self._store).publish_failure()

    def __enter__(self) -> Self:
        """Return the context itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error, leave without waiting for the other ranks."""
        good = (None, 0, contract.CONTINUE_LATER) if self.stopping else (None, 0)
        if error is None or (isinstance(error, SystemExit) and error.code in good):
            self.close()
        else:
            self.abandon()

    @cached_property
    def _tracker_group(self) -> TrackerGroup:
        from allranks.runtime.trackers import open_trackers

        return open_trackers(self.trackers)

    def _start_trackers(self) -> None:
        """Open the trackers before the training starts; an error of rank 0 is raised on all ranks."""
        if self.trackers:
            self._main.run("trackers", lambda: bool(self._tracker_group), "allranks.init(trackers=...)")

    @cached_property
    def _training(self) -> TrainingState:
        from allranks.runtime.model import TrainingState

        return TrainingState(self)

    @cached_property
    def _main(self) -> MainRank:
        values = SignedValues(self.restart, self.device)
        return MainRank(self.rank, self.world_size, self._store, values, self._watch, self.progress.clock)

    @cached_property
    def _watch(self) -> StepWatch:
        return StepWatch(self.rank, self.world_size, self.progress, self._store)

    @cached_property
    def _store(self) -> Store:
        """The store of the process group; without one, a store of this rank alone."""
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        return HashStore() if self._membership is None else self._membership.store

    def _mark_closed(self) -> None:
        self._closed.append(True)
        self.progress.clock.close(self.progress.step)
        if self._membership is not None:
            self._membership.on_close()
