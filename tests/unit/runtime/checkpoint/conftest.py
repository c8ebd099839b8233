"""A context of one rank in this process, without a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from allranks.runtime import stop
from allranks.runtime.checkpoint.checkpointer import Checkpointer
from allranks.runtime.context import Context

MadeContext = Callable[[], Context]


@pytest.fixture
def context() -> Iterator[MadeContext]:
    """Give a function that makes contexts of a world of one; they are closed after the test."""
    made: list[Context] = []

    def make() -> Context:
        ctx = Context(
            rank=0,
            local_rank=0,
            world_size=1,
            local_world_size=1,
            node_rank=0,
            device=torch.device("cpu"),
            backend="gloo",
            environment="single process",
            master_addr="127.0.0.1",
            seed=1,
        )
        made.append(ctx)
        return ctx

    yield make
    stop.close()
    for ctx in made:
        ctx.progress.stopping = False  # Otherwise closing leaves with exit code 75.
        ctx.close()


class Loop:
    """A small training: a model, Adam, and checkpoints of both."""

    def __init__(self, ctx: Context, folder: Path, width: int = 6, **options: object) -> None:
        torch.manual_seed(3)
        self.ctx = ctx
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.checkpoints: Checkpointer = ctx.checkpoints(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            **options,  # type: ignore[arg-type]
        )

    def train(self, steps: int, metric: float | None = None) -> bool:
        """Make so many steps; random numbers come from torch's generator, so that its state matters."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 4)).square().mean().backward()
            self.optimizer.step()
            if self.checkpoints.step(metric):
                return True
        return False

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


@pytest.fixture
def loop(context: MadeContext, tmp_path: Path) -> Callable[..., Loop]:
    """Give a function that makes a training which saves to ``tmp_path / "checkpoints"``."""
    return lambda **options: Loop(context(), tmp_path / "checkpoints", **options)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
