"""What each rank of ``allranks test`` runs: all parts in turn, and a word on each as soon as it is done."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

import allranks
from allranks.runs.trial import Begun, Collective, Computed, Done, Told, Who, tell
from allranks.trial.agreeing import is_any
from allranks.trial.bandwidth import by_size, links
from allranks.trial.collectives import try_all
from allranks.trial.training import Strategy, train

if TYPE_CHECKING:
    from allranks.runtime.context import Context

_REPEATS = 5
#: Bytes of the largest message, and of that of GPUs where all there is was asked for.
_LARGEST, _LARGEST_OF_GPUS = 1 << 26, 1 << 28


def main() -> None:
    """Try everything, and tell it."""
    parser = argparse.ArgumentParser(prog="allranks.trial")
    parser.add_argument("--full", action="store_true", help="larger messages, and more ways to train")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that ranks wait for each other")
    asked = parser.parse_args()
    with allranks.init(timeout=asked.timeout) as ctx:
        for told in _parts(ctx, is_full=asked.full):
            tell(told)


def _parts(ctx: Context, *, is_full: bool) -> Iterator[Told]:
    yield _who(ctx)
    is_wrong = False
    for tried in try_all(ctx, _REPEATS):
        yield tried
        is_wrong = is_wrong or (isinstance(tried, Collective) and bool(tried.wrong))
    if not is_any(ctx, "wrong", is_wrong):  # What stands on collectives that are wrong proves nothing.
        yield from _beyond(ctx, is_full)
    yield Done(ctx.rank)


def _beyond(ctx: Context, is_full: bool) -> Iterator[Told]:
    """Try what stands on the collectives."""
    is_gpu = ctx.device.type == "cuda"
    if ctx.world_size > 1:
        yield Begun(ctx.rank, "all_reduce of many bytes")
        yield from by_size(ctx, _LARGEST_OF_GPUS if is_full and is_gpu else _LARGEST)
        yield Begun(ctx.rank, "sending to neighbours")
        yield from links(ctx)
    for strategy in _strategies(is_full, is_gpu):
        yield Begun(ctx.rank, f"training ({strategy})")
        yield train(ctx, strategy)
    if is_gpu:
        from allranks.trial.gpu_compute import measure

        yield Begun(ctx.rank, "computing on its GPU")
        yield Computed(ctx.rank, measure(ctx.device))


def _strategies(is_full: bool, is_gpu: bool) -> tuple[Strategy, ...]:
    """Return how to train; ``auto`` is ``ddp`` on GPUs, and ``flat`` elsewhere."""
    if not is_full:
        return ("auto",)
    return ("ddp", "flat") if is_gpu else ("auto", "ddp")


def _who(ctx: Context) -> Who:
    gpu = torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else None
    return Who(
        rank=ctx.rank,
        world_size=ctx.world_size,
        host=socket.gethostname(),
        node_rank=ctx.node_rank,
        local_rank=ctx.local_rank,
        device=str(ctx.device),
        gpu=gpu,
        torch=str(torch.__version__),
        backend=ctx.backend,
    )


if __name__ == "__main__":
    main()
