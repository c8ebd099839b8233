"""Train a small convolutional network on handwritten digits, on any number of ranks."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from data import load
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import allranks


class Net(nn.Module):
    """Two convolutions and a linear layer; takes images of 8x8 pixels and up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def parse_args() -> argparse.Namespace:
    # A run of allranks keeps its checkpoints in its own folder: the next attempt of that run continues there.
    checkpoints = Path(os.environ.get("ALLRANKS_RUN_DIR", "."), "checkpoints")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training set")
    parser.add_argument("--batch-size", type=int, default=64, help="samples in a step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of Adam")
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's files; default: small digits")
    parser.add_argument("--checkpoint-dir", type=Path, default=checkpoints, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order of samples")
    return parser.parse_args()


def train(ctx: allranks.Context, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> float:
    """Train for one epoch; return the mean loss over the samples of all ranks."""
    model.train()
    total = torch.zeros((), device=ctx.device)
    samples = 0
    for step, (images, labels) in enumerate(loader, 1):
        images, labels = images.to(ctx.device), labels.to(ctx.device)
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(labels)
        samples += len(labels)
        show_progress(ctx, step, len(loader))
    loss_sum, count = ctx.sum(total.item(), samples)
    return loss_sum / count


@torch.no_grad()
def evaluate(ctx: allranks.Context, model: nn.Module, data: TensorDataset) -> float:
    """Return the share of right answers; the ranks take turns, so that each sample counts exactly once."""
    model.eval()
    mine = Subset(data, range(ctx.rank, len(data), ctx.world_size))
    right = 0
    for images, labels in DataLoader(mine, batch_size=256):
        answers = model(images.to(ctx.device)).argmax(dim=1)
        right += int((answers == labels.to(ctx.device)).sum())
    right_everywhere, count = ctx.sum(right, len(mine))
    return right_everywhere / count


def show_progress(ctx: allranks.Context, step: int, steps: int) -> None:
    if ctx.is_main and ctx.terminal:
        end = "\r\033[K" if step == steps else ""
        print(f"\r[{'#' * (30 * step // steps):30}] {step}/{steps}", end=end, file=sys.stderr, flush=True)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint such that its name never stands for half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def restore(ctx: allranks.Context, path: Path) -> dict[str, Any] | None:
    """Load the checkpoint on rank 0 and hand it to all, which may not see the same folder."""
    box = [torch.load(path, map_location="cpu", weights_only=True) if ctx.is_main and path.exists() else None]
    distributed.broadcast_object_list(box, src=0, device=ctx.device)
    return box[0]


def main() -> None:
    args = parse_args()
    with allranks.init(seed=args.seed) as ctx:
        ranks = ctx.world_size
        ctx.print(f"Processes: {ranks} on {ctx.device.type} ({ctx.backend}), master node: {ctx.master_addr}")
        if args.batch_size % ranks:
            raise SystemExit(f"error: --batch-size {args.batch_size} does not divide among {ranks} ranks")
        training, held_out = load(args.data_dir)

        torch.manual_seed(args.seed)  # the same weights to start from on any number of ranks
        net = Net().to(ctx.device)
        model = DistributedDataParallel(net)
        optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
        sampler = DistributedSampler(training, ranks, ctx.rank, seed=args.seed)
        loader = DataLoader(training, args.batch_size // ranks, sampler=sampler)

        checkpoint, done = args.checkpoint_dir / "checkpoint.pt", 0
        if state := restore(ctx, checkpoint):
            net.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            done = state["epoch"]
            ctx.print(f"Continuing after epoch {done} from {checkpoint}")

        for epoch in range(done + 1, args.epochs + 1):
            sampler.set_epoch(epoch)  # another order in each epoch
            for group in optimizer.param_groups:
                group["lr"] = args.lr * 0.8 ** (epoch - 1)  # known from the epoch alone, also after a resume
            loss = train(ctx, model, optimizer, loader)
            accuracy = evaluate(ctx, net, held_out)
            ctx.print(f"Epoch {epoch} - Avg Loss: {loss:.4f}, Accuracy: {accuracy:.2%}")
            if ctx.is_main:
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                save(checkpoint, state)
        ctx.print(f"Trained for {max(done, args.epochs)} epochs; the checkpoint is {checkpoint}")


if __name__ == "__main__":
    main()
