"""The object that a training script holds: its rank, and the building blocks of a training loop."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from allranks import contract
from allranks.errors import RankError
from allranks.runtime.call_errors import answering, no_attribute, positive, scale_factor
from allranks.runtime.exchange import CpuGroup, MainRank
from allranks.runtime.peers import Peers, StepWatch
from allranks.runtime.progress import Progress
from allranks.runtime.steptime import EXCHANGE

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import torch
    from torch import nn
    from torch._C._distributed_c10d import Store
    from typing_extensions import Self

    from allranks.runtime.checkpoint.checkpointer import make_checkpointer
    from allranks.runtime.data import make_evaluation_loader, make_loader
    from allranks.runtime.metrics import Metrics
    from allranks.runtime.model.backward import accumulate_block, autocast_block, run_backward
    from allranks.runtime.model.optimizer import Scaler, make_optimizer
    from allranks.runtime.model.prepare import prepare_model
    from allranks.runtime.rendezvous import Membership
    from allranks.runtime.trackers import Tracker, TrackerGroup

P = ParamSpec("P")
T = TypeVar("T")


class _Elsewhere:
    """A method implemented by a function of another module, which is imported at its first use."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, ctx: object, kind: type) -> Any:
        function = resolve_name(f"allranks.runtime.{self._place}")
        function.__qualname__ = f"{self._owner.__name__}.{self._name}"  # For error messages.
        function = answering(function)
        setattr(self._owner, self._name, function)  # Replaces this descriptor.
        return function.__get__(ctx, kind)


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
    #: Called, last in first out, when the context is closed, on all ranks and before the process group is left.
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

    @answering
    def print(self, *values: object) -> None:
        """Print a line on rank 0 only, and flush it. Ranks need not all call it."""
        if self.is_main:
            sys.stdout.write(" ".join(map(str, values)) + "\n")
            sys.stdout.flush()

    @answering
    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        from torch import distributed

        with self.progress.clock.during(EXCHANGE):
            distributed.barrier()

    @answering
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
        try:
            total = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
        except (TypeError, ValueError) as error:
            kinds = ", ".join(type(value).__name__ for value in values)
            fix = "ctx.sum(loss_sum, count); for a tensor of several numbers, torch.distributed.all_reduce(tensor)"
            raise RankError(f"ctx.sum() got {kinds}", why="it sums single numbers", fix=fix) from error
        with self.progress.clock.during(EXCHANGE):
            distributed.all_reduce(total)
        return [float(value) for value in total.tolist()]

    @answering
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
        if not callable(fn):
            fix = "give the function and its arguments, without calling it: ctx.on_main(evaluate, model)"
            raise RankError(f"ctx.on_main() got {type(fn).__name__}", why="expected a function", fix=fix)
        return self._main.on_main(fn, args, kwargs)

    # The blocks of a training loop: functions of other modules that take the context.
    if TYPE_CHECKING:
        loader = make_loader
        evaluation_loader = make_evaluation_loader
        prepare = prepare_model
        optimizer = make_optimizer
        autocast = autocast_block
        backward = run_backward
        accumulate = accumulate_block
        checkpoints = make_checkpointer
    else:
        loader = _Elsewhere("data:make_loader")
        evaluation_loader = _Elsewhere("data:make_evaluation_loader")
        prepare = _Elsewhere("model.prepare:prepare_model")
        optimizer = _Elsewhere("model.optimizer:make_optimizer")
        autocast = _Elsewhere("model.backward:autocast_block")
        backward = _Elsewhere("model.backward:run_backward")
        accumulate = _Elsewhere("model.backward:accumulate_block")
        checkpoints = _Elsewhere("checkpoint.checkpointer:make_checkpointer")

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError with a suggestion; an AttributeError inside a property is passed on."""
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)
            raise no_attribute(name, dir(self))

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
        ratio = positive("batch_size", batch_size) / positive("base_batch_size", base_batch_size)
        if not (isinstance(lr, (int, float)) and math.isfinite(lr) and lr >= 0):
            raise RankError(f"invalid learning rate: lr={lr!r}", fix="give a finite number from 0 on")
        return lr * scale_factor("rule", rule, ratio)

    @cached_property
    def metrics(self) -> Metrics:
        """Metrics of the training: averaged over samples and ranks, and written by rank 0."""
        from allranks.runtime.metrics import Metrics

        made = Metrics(self)
        # Closed last, because other blocks may still record something while they close.
        self.closing.insert(0, made.finish)
        return made

    @staticmethod
    def unwrap(model: nn.Module) -> nn.Module:
        """Return the model without its data parallel wrapper; in a world of one rank, the model itself.

        Its forward pass needs no other rank, so it can run in :meth:`on_main`. A sharded model stays sharded, and needs
        all ranks.

        Args:
            model: the result of :meth:`prepare`.
        """
        from allranks.runtime.model.flat_gradients import unwrap

        return unwrap(model)

    @cached_property
    def scaler(self) -> Scaler:
        """The gradient scaler, a ``torch.amp.GradScaler``: active with ``precision="fp16"`` only."""
        from allranks.runtime.model.optimizer import Scaler

        return Scaler(self.device.type, enabled=self.precision == "fp16")

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
        if self._membership is not None:
            self._membership.leave(self.world_size)
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
        if self._membership is not None and self._membership.ours:
            self._membership.abandon(self.backend)
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
    def _main(self) -> MainRank:
        return MainRank(self)

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
