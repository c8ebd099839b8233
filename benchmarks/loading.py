"""Loading batches: ours against torch's DataLoader, and what reproducible augmentation costs.

Everything runs in one process on one thread, so that the ratio is of the work and not of the cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from harness import in_turn, report
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset, TensorDataset

import allranks

BATCH = 64
ROUNDS = 15
IMAGES = torch.rand(6_400, 1, 28, 28)
LABELS = torch.randint(10, (6_400,))
PHOTOS = torch.randint(256, (640, 3, 64, 64), dtype=torch.uint8)


class ByItem(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """MNIST-shaped samples from memory, one by one."""

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return IMAGES[number], LABELS[number]


class SamplesByList(ByItem):
    """The same, with torch's own convention for lists: it gives samples, which are stacked afterwards."""

    def __getitems__(self, numbers: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(IMAGES[numbers], LABELS[numbers], strict=True))


class BatchByList(ByItem):
    """The same, giving a whole batch at once."""

    def __getitems__(self, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.tensor(numbers)
        return IMAGES[rows], LABELS[rows]


class Augmented(Dataset[torch.Tensor]):
    """Random crop, flip and noise on images of 3 x 64 x 64."""

    def __len__(self) -> int:
        return len(PHOTOS)

    def __getitem__(self, number: int) -> torch.Tensor:
        image = pad(PHOTOS[number].float().div_(255), (4, 4, 4, 4))
        top, left = torch.randint(9, (2,)).tolist()
        image = image[:, top : top + 64, left : left + 64]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image + 0.1 * torch.randn(3, 64, 64)


def passes(loader: Iterable[Any]) -> float:
    """Return the microseconds that a batch takes, over one pass: of CPU time, for nothing here waits."""
    count = 0
    began = time.process_time()
    for _ in loader:
        count += 1
    return (time.process_time() - began) / count * 1e6


def compare(what: str, ours: Iterable[Any], theirs: Iterable[Any], bar: str, *, inverse: bool = True) -> None:
    subjects: list[Callable[[], float]] = [partial(passes, ours), partial(passes, theirs)]
    mine, peer = in_turn(ROUNDS, *subjects)
    report(what, mine, peer, "µs a batch", bar, inverse=inverse)


def main() -> None:
    torch.set_num_threads(1)
    standard = partial(DataLoader, batch_size=BATCH, shuffle=True)
    with allranks.init() as ctx:
        ours = partial(ctx.loader, batch_size=BATCH, workers=0, quiet=True)
        tensors = TensorDataset(IMAGES, LABELS)
        compare("TensorDataset", ours(tensors), standard(tensors), "≥ 1.5")
        compare("__getitems__ that gives a batch, peer by item", ours(BatchByList()), standard(ByItem()), "≥ 1.5")
        compare("__getitems__ that gives samples, peer too", ours(SamplesByList()), standard(SamplesByList()), "≥ 0.97")
        compare("item by item, nothing random", ours(ByItem()), standard(ByItem()), "≥ 0.9")
        compare("augmented, seeded for each sample", ours(Augmented()), standard(Augmented()), "≤ 1.1", inverse=False)


if __name__ == "__main__":
    main()
