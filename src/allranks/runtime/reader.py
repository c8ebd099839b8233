"""What a rank reads while it trains, and where it stands in that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from allranks.runtime.control import Control
from allranks.runtime.member import Member
from allranks.runtime.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from allranks.runtime.data import EvaluationLoader, Loader


@dataclass(frozen=True)
class Reader(Member):
    """One rank that reads data: the part of :class:`Context` that needs no model."""

    @cached_property
    def progress(self) -> Progress:
        """How far the training is: the number of steps done, and what the current batch stands for."""
        return Progress()

    @cached_property
    def control(self) -> Control:
        """Small messages between ranks on the CPU; the first use of it is collective, as every use."""
        return Control(self.world_size, self.timeout)

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
        """Give what the training loop iterates: this rank's part of each batch, on its device.

        All ranks call it, each with the whole dataset. The order of samples depends on seed, epoch and the dataset's
        length alone, and the position is kept in samples: none is seen twice in an epoch, nor dropped without
        ``drop_last``, whatever the number of ranks and workers and however often the training is stopped and
        continued, also on another number of ranks. If the last batch of an epoch has fewer samples than there are
        ranks, some get a filler of one sample, with ``ctx.progress.samples`` 0, which ``ctx.backward`` and
        ``ctx.metrics`` leave out.

        Random numbers that ``dataset[i]`` draws from ``random``, ``numpy.random`` or torch's default generator on
        the CPU depend on seed, epoch and ``i`` alone, and none of the training's are used up. The first batch that
        draws some is fetched twice.

        A stream, a torch ``IterableDataset`` or anything with only ``__iter__``, is run through by each rank in full;
        the same holds for it as long as it is the same each time. It is not shuffled.

        Args:
            dataset: anything with ``__getitem__`` and ``__len__``, or a stream.
            batch_size: samples of a batch on each rank.
            global_batch_size: samples of a batch over all ranks; one of the two must be given.
            shuffle: False keeps the dataset's order.
            seed: of order and augmentation; default: the context's, else 0.
            workers: processes on each rank that fetch batches; 0: the rank itself does. ``"auto"``: the CPUs that
                the rank has for itself, less one; at most one for a stream; none for a ``TensorDataset`` and for a
                dataset that fetches lists of samples (``__getitems__``).
            pin_memory: whether batches go to the GPU through pinned memory; default: if the device is one. It has
                no effect where there is no GPU.
            prefetch: batches that each worker has ready.
            collate_fn: puts a list of samples together to a batch; default: torch's ``default_collate``.
            worker_init_fn: called in each worker with its number.
            drop_last: leave out the samples that do not fill a batch at the end of an epoch.
            fetch: ``"item"`` calls ``dataset[i]`` for each sample also where the dataset could fetch lists of them,
                whose random numbers are seeded once for a list.
            sharded: for streams: the dataset gives each rank a part of its own. The epoch ends for all ranks when the
                first has no more samples, the ranks agree on that in each step, and a resume skips as many batches.
            quiet: do not print the size of the batch.

        Raises:
            RankError: the dataset is empty or has fewer samples than there are ranks, the global batch does not
                divide by the number of ranks, the ranks disagree on any of this, or a value makes no sense.
        """
        from allranks.runtime.data import make_loader

        return make_loader(
            self,
            dataset,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            seed=seed,
            workers=workers,
            pin_memory=pin_memory,
            prefetch=prefetch,
            collate_fn=collate_fn,
            worker_init_fn=worker_init_fn,
            drop_last=drop_last,
            fetch=fetch,
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
        """Give what an evaluation iterates: every sample exactly once over all ranks, in the dataset's order.

        Nothing is padded, and all ranks have the same number of batches, so that models that communicate in their
        forward pass can be evaluated too: batches at the end may be smaller, or greater by one sample. While it is
        iterated, ``ctx.progress`` speaks of its batches, and afterwards again of the training's. Random numbers are
        the same in each evaluation.

        Args:
            dataset: as for :meth:`loader`.
            batch_size: samples of a batch on each rank.
            seed: of random numbers that the dataset draws; default: the context's, else 0.
            workers: as for :meth:`loader`.
            pin_memory: as for :meth:`loader`.
            prefetch: as for :meth:`loader`.
            collate_fn: as for :meth:`loader`.
            worker_init_fn: as for :meth:`loader`.
            fetch: as for :meth:`loader`.
            same_steps: False: ranks may have one batch less than others. It is needed where there are fewer samples
                than ranks.
            whole: this rank gets all samples, for an evaluation on one rank alone.

        Raises:
            RankError: the dataset is empty, or has fewer samples than there are ranks.
        """
        from allranks.runtime.data import make_evaluation_loader

        return make_evaluation_loader(
            self,
            dataset,
            batch_size=batch_size,
            seed=seed,
            workers=workers,
            pin_memory=pin_memory,
            prefetch=prefetch,
            collate_fn=collate_fn,
            worker_init_fn=worker_init_fn,
            fetch=fetch,
            same_steps=same_steps,
            whole=whole,
        )

    @staticmethod
    def scaled_lr(
        lr: float, *, batch_size: int, base_batch_size: int, rule: Literal["linear", "sqrt"] = "linear"
    ) -> float:
        """Give the learning rate for a batch size, from one that was found to be good for another batch size.

        ``"linear"`` multiplies with ``batch_size / base_batch_size`` (Goyal et al. 2017, arXiv:1706.02677, with some
        epochs of warm-up), ``"sqrt"`` with its square root (Krizhevsky 2014, arXiv:1404.5997).

        Args:
            lr: the learning rate that is good for ``base_batch_size``.
            batch_size: samples of one optimizer step: ``loader.global_batch_size`` times the accumulated micro-batches.
            base_batch_size: samples of one step for which ``lr`` was found.
            rule: ``"linear"`` or ``"sqrt"``.

        Raises:
            RankError: a value makes no sense.
        """
        from allranks.runtime.batch import scaled_lr

        return scaled_lr(lr, batch_size=batch_size, base_batch_size=base_batch_size, rule=rule)

    def _release(self) -> None:
        if "control" in vars(self):
            self.control.release()
