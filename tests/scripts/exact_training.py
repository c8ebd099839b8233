"""A training in which everything that is random counts: for tests that hurt it and look at how it ends.

It prints the samples of each micro-batch, by rank, and at the end a digest of the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import allranks
from allranks.runtime.checkpoint.restore import Resumed


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
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--clip-norm", type=float)
    parser.add_argument("--width", type=int, default=32, help="of the model: it has 10 parameters for each")
    parser.add_argument("--hurt", action="store_true", help="rank 1 is killed, and after a restart asked to stop")
    parser.add_argument("--slow-until", type=Path, help="pause in each step until this file is there")
    parser.add_argument("--pause", type=float, default=0.3, help="how long, in seconds")
    parser.add_argument("--quiet", action="store_true", help="do not print the samples")
    return parser.parse_args()


def hurt(ctx: allranks.Context, resumed: Resumed | None) -> None:
    """Kill this rank at step 10; once it continues from a checkpoint, ask it to stop 8 steps later."""
    if ctx.progress.step == (10 if resumed is None else resumed.step + 8):
        os.kill(os.getpid(), signal.SIGKILL if resumed is None else signal.SIGTERM)


def digest(net: nn.Module) -> str:
    """Return a digest of all weights; of a sharded model all ranks have to ask for it."""
    values = [getattr(value, "full_tensor", lambda value=value: value)() for value in net.state_dict().values()]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


def main(optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
    options = parse_args()
    every = int(options.every) if options.every.isdigit() else options.every
    with allranks.init(seed=3, precision=options.precision) as ctx:
        net = nn.Sequential(
            nn.Linear(8, options.width), nn.Dropout(options.dropout), nn.ReLU(), nn.Linear(options.width, 1)
        )
        model = ctx.prepare(net, strategy=options.strategy)
        optimizer = ctx.optimizer(optimizer_class, model, lr=0.01, clip_norm=options.clip_norm)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        loader = ctx.loader(Noisy(options.size), global_batch_size=options.batch, workers=options.workers)
        checkpoints = ctx.checkpoints(
            options.folder,
            every=every,
            background=not options.hurt,
            save_at_end=False,  # What continues shall do so in the middle of an epoch.
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            loader=loader,
        )
        for epoch in loader.epochs(options.epochs):
            for indices, inputs, targets in loader:
                with ctx.accumulate(model, options.accumulate):
                    if not options.quiet:
                        place = f"epoch {epoch} step {ctx.progress.step}.{ctx.progress.micro}"
                        print(f"{place} samples {indices.tolist()}", flush=True)
                    with ctx.autocast():
                        loss = nn.functional.mse_loss(model(inputs), targets)
                    ctx.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if options.slow_until and not options.slow_until.exists():
                    time.sleep(options.pause)
                ctx.metrics.log(loss=loss)
                if options.hurt and ctx.rank == 1:
                    hurt(ctx, checkpoints.resumed)
                if checkpoints.step():
                    break
            else:
                schedule.step()
                ctx.print(f"epoch {epoch} loss {ctx.metrics.means()['loss']:.9f}")
        if not ctx.stopping:
            told = f"step {ctx.progress.step} weights {digest(net)}"
            ctx.print(told)


if __name__ == "__main__":
    main()
