"""Four metrics a step: speed with / without, on a tiny model, one process and 2 ranks over gloo, in turn.

Also, in one process: the time of one call, with one tensor that has a gradient and with four.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import PYTHON

ROUNDS, STEPS, CALLS = 151, 100, 20_000


def train(model, optimizer, ctx, *, metrics: bool) -> float:
    """Return seconds for a number of steps."""
    import torch

    inputs, targets = torch.randn(16, 32), torch.randint(10, (16,))
    began = time.perf_counter()
    for _ in range(STEPS):
        output = model(inputs)
        loss = torch.nn.functional.cross_entropy(output, targets)
        # What is logged is computed in both cases: it is the logging that is measured.
        entropy, largest, smallest = output.mean(), output.amax(), output.amin()
        ctx.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if metrics:
            ctx.metrics.log(loss=loss, entropy=entropy, largest=largest, smallest=smallest)
    return time.perf_counter() - began


def rank() -> None:
    import torch

    import allranks

    torch.set_num_threads(1)
    with allranks.init(log_every=50) as ctx:
        model = ctx.prepare(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)))
        optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.01)
        ratios, seconds = [], []
        for number in range(ROUNDS):
            # Each goes first as often as the other.
            order = (True, False) if number % 2 else (False, True)
            times = {metrics: train(model, optimizer, ctx, metrics=metrics) for metrics in order}
            ratios.append(times[False] / times[True])
            seconds.append(times[False] / STEPS)
        step = statistics.median(seconds) * 1e6
        ctx.print(
            f"{ctx.world_size} rank(s), 4 metrics a step: speed with / without = {statistics.median(ratios):.3f} "
            f"(bar: >= 0.97), a step without takes {step:.0f} us"
        )
        if ctx.world_size == 1:
            loss = torch.ones(2, requires_grad=True).sum()
            for names in (("a",), ("a", "b", "c", "d")):
                values = dict.fromkeys(names, loss)
                began = time.perf_counter()
                for _ in range(CALLS):
                    ctx.metrics.log(**values)
                each = (time.perf_counter() - began) / CALLS * 1e6
                ctx.print(f"log() of {len(names)} tensor(s): {each:.2f} us")


def main() -> None:
    for world_size in (1, 2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        with tempfile.TemporaryDirectory(prefix="allranks-bench-") as folder:
            variables = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ranks = [
                subprocess.Popen(
                    [PYTHON, str(Path(__file__).resolve()), "rank"],
                    cwd=folder,
                    env={**os.environ, **variables, "RANK": str(number), "LOCAL_RANK": str(number)},
                    stderr=subprocess.DEVNULL,
                )
                for number in range(world_size)
            ]
            codes = [process.wait() for process in ranks]
            if any(codes):
                sys.exit("a rank failed")


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
