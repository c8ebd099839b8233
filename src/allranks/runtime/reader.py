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
        """Position in the training: the number of steps done, and the size of the current batch."""
        return Progress()

    @cached_property
    def control(self) -> Control:
        """Small messages between ranks, over the CPU. Reading it the first time is collective."""
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
        """Return the learning rate for a batch size, scaled from one that was tuned for another batch size.

        ``"linear"`` multiplies by ``batch_size / base_batch_size`` (Goyal et al. 2017, arXiv:1706.02677, with a few
        epochs of warm-up), ``"sqrt"`` by its square root (Krizhevsky 2014, arXiv:1404.5997). It needs no other rank.

        Args:
            lr: the learning rate tuned for ``base_batch_size``.
            batch_size: samples in an optimizer step: ``loader.global_batch_size`` times the accumulated micro-batches.
            base_batch_size: samples in an optimizer step for which ``lr`` was tuned.
            rule: ``"linear"`` or ``"sqrt"``.

        Raises:
            RankError: a value is invalid.
        """
        from allranks.runtime.batch import scaled_lr

        return scaled_lr(lr, batch_size=batch_size, base_batch_size=base_batch_size, rule=rule)

    def _release(self) -> None:
        if "control" in vars(self):
            self.control.release()
