"""Runs all parts of ``allranks test`` in a rank, and reports each as soon as it is done."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

import allranks
from allranks.record.selftest import Collective, Done, GpuResult, OperationStarted, RankInfo, SelfTestReport, send
from allranks.selftest.collectives import by_size, in_training, is_any, links, try_all
from allranks.selftest.computing import Strategy, measure_products, train

if TYPE_CHECKING:
    from allranks.runtime.context import Context

_REPEATS = 5
#: Bytes of the largest message, and of the largest on GPUs with --full.
_LARGEST, _LARGEST_OF_GPUS = 1 << 26, 1 << 28


def main() -> None:
    """Run and report all parts."""
    parser = argparse.ArgumentParser(prog="allranks.selftest")
    parser.add_argument("--full", action="store_true", help="larger messages, and more ways to train")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that ranks wait for each other")
    options = parser.parse_args()
    with allranks.init(timeout=options.timeout) as ctx:
        send(_who(ctx))
        is_wrong = False
        for report in try_all(ctx, _REPEATS):
            send(report)
            is_wrong = is_wrong or (isinstance(report, Collective) and bool(report.wrong))
        if not is_any(ctx, "wrong", is_wrong):  # Further tests need correct collectives.
            for report in _beyond(ctx, options.full):
                send(report)
        send(Done(ctx.rank))


def _beyond(ctx: Context, is_full: bool) -> Iterator[SelfTestReport]:
    """Run the tests that need collectives."""
    is_gpu = ctx.device.type == "cuda"
    if ctx.world_size > 1:
        yield OperationStarted(ctx.rank, "all_reduce of many bytes")
        yield from by_size(ctx, _LARGEST_OF_GPUS if is_full and is_gpu else _LARGEST)
        yield OperationStarted(ctx.rank, "exchanging parameters and gradients")
        yield from in_training(ctx)
        yield OperationStarted(ctx.rank, "sending to neighbours")
        yield from links(ctx)
    strategies: tuple[Strategy, ...] = ("auto",)  # ddp on GPUs, and flat elsewhere.
    if is_full:
        strategies = ("ddp", "flat") if is_gpu else ("auto", "ddp")
    for strategy in strategies:
        yield OperationStarted(ctx.rank, f"training ({strategy})")
        yield train(ctx, strategy)
    if is_gpu:
        yield OperationStarted(ctx.rank, "computing on its GPU")
        yield GpuResult(ctx.rank, measure_products(ctx.device))


def _who(ctx: Context) -> RankInfo:
    gpu = torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else None
    return RankInfo(
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
