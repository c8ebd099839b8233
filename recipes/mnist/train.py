"""Train a small convolutional network on handwritten digits, on any number of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from data import load
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import allranks


class Block(nn.Sequential):
    """Layers whose activations --checkpoint-activations computes again instead of keeping them."""


class Net(nn.Module):
    """Two convolutions and a linear layer; takes images of 8x8 pixels and up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Block(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
            Block(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(4)),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--epochs", type=int, default=8, help="passes over the training set")
    add("--batch-size", type=int, default=64, help="samples in a step, over all ranks")
    add("--accumulate", type=int, default=1, help="micro-batches in which each step is computed, to save memory")
    add("--lr", type=float, default=3e-3, help="learning rate of Adam")
    add("--data-dir", type=Path, help="directory with MNIST's files; default: small digits")
    add("--checkpoint-dir", type=Path, help="default: checkpoints, in the directory of the run")
    add("--checkpoint-activations", action="store_true", help="compute them again in the backward pass")
    add("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the forward pass")
    add("--seed", type=int, default=0, help="seed of weights and order of samples")
    args = parser.parse_args()
    if not min(args.epochs, args.batch_size, args.accumulate, args.lr) > 0:
        parser.error("--epochs, --batch-size, --accumulate and --lr must be greater than 0")
    if args.batch_size % args.accumulate:
        parser.error(f"--batch-size {args.batch_size} does not divide by --accumulate {args.accumulate}")
    return args


@torch.no_grad()
def evaluate(ctx: allranks.Context, model: nn.Module, data: TensorDataset) -> float:
    """Return the share of right answers; the ranks share the samples, and each counts exactly once."""
    model.eval()
    right = sum(
        int((model(images).argmax(dim=1) == labels).sum())
        for images, labels in ctx.evaluation_loader(data, batch_size=256)
    )
    model.train()
    return ctx.sum(right)[0] / len(data)


def shown(ctx: allranks.Context, loader: Any, epoch: int) -> Iterable[Any]:
    """Return the batches of an epoch; on a terminal, rank 0 draws how far it is."""
    if not (ctx.is_main and ctx.terminal and find_spec("tqdm")):
        return loader
    from tqdm import tqdm  # only where it is seen: other ranks and batch jobs do without

    return tqdm(loader, desc=f"Epoch {epoch + 1}", leave=False)


def main() -> None:
    args = parse_args()
    with allranks.init(seed=args.seed, precision=args.precision) as ctx:
        ctx.print(f"Processes: {ctx.world_size} on {ctx.device.type} ({ctx.backend}), master node: {ctx.master_addr}")
        training, held_out = load(args.data_dir)
        model = ctx.prepare(Net(), checkpoint_activations=[Block] if args.checkpoint_activations else [])
        optimizer = ctx.optimizer(torch.optim.Adam, model, lr=args.lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        loader = ctx.loader(training, global_batch_size=args.batch_size // args.accumulate)
        # allranks resume continues from there; another run has a directory of its own, and starts from the beginning
        folder = args.checkpoint_dir or ctx.run_dir / "checkpoints"
        checkpoints = ctx.checkpoints(
            folder, every="10min", model=model, optimizer=optimizer, schedule=schedule, loader=loader
        )
        for epoch in loader.epochs(args.epochs):
            for images, labels in shown(ctx, loader, epoch):
                with ctx.accumulate(model, args.accumulate):  # ranks exchange gradients in the last of them
                    with ctx.autocast():
                        loss = functional.cross_entropy(model(images), labels)
                    ctx.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                ctx.metrics.log(loss=loss)
                if checkpoints.step():  # saves when it is time to, and when the job is asked to stop
                    break
            else:
                schedule.step()
                loss, accuracy = ctx.metrics.means()["loss"], evaluate(ctx, model, held_out)
                ctx.metrics.record(loss=loss, accuracy=accuracy)
                ctx.print(f"Epoch {epoch + 1} - Avg Loss: {loss:.4f}, Accuracy: {accuracy:.2%}")
                checkpoints.save()
        if not ctx.stopping:
            ctx.print(f"Trained for {args.epochs} epochs; the checkpoints are in {folder}")


if __name__ == "__main__":
    main()
