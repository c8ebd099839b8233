"""A training in which everything that is random counts: for tests that hurt it and look at how it ends.

It prints the samples of each step, by rank, and at the end a digest of the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import random

import torch
from torch import nn
from torch.utils.data import Dataset

import allranks


class Noisy(Dataset):
    """Samples that are another in each epoch, and in each epoch the same."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        noise = torch.randn(8) + random.random()
        return index, torch.full((8,), index / self.size) + noise, torch.tensor([index % 3.0])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="checkpoints")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--every", default="2")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--quiet", action="store_true", help="do not print the samples")
    return parser.parse_args()


def main() -> None:
    options = parse_args()
    every = int(options.every) if options.every.isdigit() else options.every
    with allranks.init(seed=3) as ctx:
        net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(options.dropout), nn.ReLU(), nn.Linear(32, 1))
        model = ctx.prepare(net, strategy=options.strategy)
        optimizer = ctx.optimizer(torch.optim.AdamW, model, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        loader = ctx.loader(Noisy(options.size), global_batch_size=options.batch, workers=options.workers)
        checkpoints = ctx.checkpoints(
            options.folder, every=every, model=model, optimizer=optimizer, schedule=schedule, loader=loader
        )
        for epoch in loader.epochs(options.epochs):
            for indices, inputs, targets in loader:
                with ctx.accumulate(model, options.accumulate):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    ctx.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                ctx.metrics.log(loss=loss)
                if not options.quiet:
                    print(f"epoch {epoch} step {ctx.progress.step} samples {indices.tolist()}", flush=True)
                if checkpoints.step():
                    break
            else:
                schedule.step()
                ctx.print(f"epoch {epoch} loss {ctx.metrics.means()['loss']:.9f}")
        if not ctx.stopping:
            data = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
            ctx.print(f"step {ctx.progress.step} weights {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main()
