"""Steps per second, 2 ranks over gloo, one thread each: ours / a plain DDP loop, and / one tuned by hand.

All three train in the same pair of processes, in turn, a block of steps each. The tuned loop has gradients as views of
DDP's buckets, a static graph and a fused optimizer. Batches are made beforehand: loading has its own benchmark.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from socket import socket

from harness import PYTHON, report

#: What is measured, how many steps a block has, and the bars against the plain and the tuned loop.
SUBJECTS = {
    "wide, 8M parameters": (4, ">= 1.5", ">= 0.97"),
    "deep, 102 tensors": (20, ">= 1.25", ">= 0.97"),
    "tiny": (200, ">= 0.97", ""),
    "convolutions with batch norm": (20, ">= 0.97", ""),
    "transformer block, bf16": (5, ">= 0.97", ""),
    "deep, 4 micro-batches": (10, ">= 0.97", ""),
}
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "15"))


def main() -> None:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [PYTHON, __file__, *sys.argv[1:]], env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


def rank() -> None:
    import torch

    import allranks

    wanted = sys.argv[1:]
    torch.set_num_threads(1)
    with allranks.init(seed=1, precision="fp32") as ctx, torch.random.fork_rng():
        for name, (block, over_plain, over_tuned) in SUBJECTS.items():
            if wanted and not any(name.startswith(word) for word in wanted):
                continue
            object.__setattr__(ctx, "precision", "bf16" if "bf16" in name else "fp32")
            loops = [make_loop(name, kind, ctx) for kind in ("ours", "plain", "tuned")]
            ours, plain, tuned = (1 / seconds for seconds in measure(loops, block))
            if ctx.is_main:
                report(f"{name}, over plain", ours, plain, "steps/s", over_plain)
                report(f"{name}, over tuned", ours, tuned, "steps/s", over_tuned or "none")


def measure(loops: list[Callable[[], None]], block: int) -> list[float]:
    """Return the median seconds of a step of each loop; the first in a round takes turns."""
    from torch import distributed

    times: list[list[float]] = [[] for _ in loops]
    for turn in range(ROUNDS + 1):
        for offset in range(len(loops)):
            which = (turn + offset) % len(loops)
            distributed.barrier()
            began = time.perf_counter()
            for _ in range(block):
                loops[which]()
            if turn:  # The first round warms up.
                times[which].append((time.perf_counter() - began) / block)
    return [statistics.median(column) for column in times]


def make_loop(name, kind, ctx):
    """Give a function that makes one step."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(1)
    model, batch = make_model(name)
    x, y = batch
    micro = 4 if "micro" in name else 1
    criterion = nn.CrossEntropyLoss()
    if kind == "ours":
        model = ctx.prepare(model)
        optimizer = ctx.optimizer(torch.optim.AdamW, model, lr=1e-4)

        def ours():
            for _ in range(micro):
                with ctx.accumulate(model, steps=micro), ctx.autocast():
                    loss = criterion(model(x), y)
                    ctx.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

        return ours
    tuned = kind == "tuned"
    parameters = list(model.parameters())
    model = DistributedDataParallel(model, gradient_as_bucket_view=tuned, static_graph=tuned and micro == 1)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, **({"fused": True} if tuned else {}))

    def forward_backward():
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in name):
            loss = criterion(model(x), y) / micro
        loss.backward()

    def theirs():
        with model.no_sync():
            for _ in range(micro - 1):
                forward_backward()
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()

    return theirs


def make_model(name):
    """Give a model, a batch and its labels."""
    import torch
    from torch import nn

    labels = torch.randint(0, 10, (32,))
    if name.startswith("wide"):
        layers = [nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024)]
        return nn.Sequential(*layers, nn.ReLU(), nn.Linear(1024, 10)), (torch.randn(32, 784), labels)
    if name.startswith("deep"):
        layers = [layer for _ in range(50) for layer in (nn.Linear(64, 64), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(64, 10)), (torch.randn(32, 64), labels)
    if name.startswith("tiny"):
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)), (torch.randn(32, 16), labels)
    if name.startswith("convolutions"):
        layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.BatchNorm2d(32)]
        head = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
        return nn.Sequential(*layers, *head), (torch.randn(32, 1, 28, 28), labels)
    block = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    return nn.Sequential(block, nn.Flatten(), nn.Linear(32 * 128, 10)), (torch.randn(32, 32, 128), labels)


if __name__ == "__main__":
    if "RANK" in os.environ and Path(sys.argv[0]).name == Path(__file__).name:
        rank()
    else:
        main()
