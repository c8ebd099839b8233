"""Time added to a step of a tiny model in one process, in microseconds: ours, and Fabric, Accelerate beside it.

Each loop does what its library shows first: gradients averaged where there are ranks, an accumulation block, mixed
precision (here: none), optimizer, and the metrics logged. The bare loop does the training alone.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import workplace

os.environ.setdefault("OMP_NUM_THREADS", "1")
BLOCK = 200
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "15"))


def main() -> None:
    import torch

    import allranks

    torch.set_num_threads(1)
    with workplace() as folder, chdir(folder), allranks.init("gloo", seed=1) as ctx:
        loops = {"bare": bare(), "bare, fused": bare(fused=True), "ours": ours(ctx), **peers()}
        seconds = measure(list(loops.values()))
    medians = dict(zip(loops, seconds, strict=True))
    for name, value in medians.items():
        added = (value - medians["bare"]) * 1e6
        bar = " (bar: <= 20)" if name == "ours" else ""
        print(f"a step, {name}: {value * 1e6:.1f} us, added to the bare loop {added:.1f} us{bar}", flush=True)
    more = (medians["ours"] - medians["bare, fused"]) * 1e6
    print(f"ours, added to the bare loop with a fused optimizer: {more:.1f} us (bar: <= 20)", flush=True)


@contextmanager
def chdir(folder: Path) -> Iterator[None]:
    """Work in a folder: metrics are written where the process is."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def measure(loops: list[Callable[[], None]]) -> list[float]:
    """Return the median seconds of a step of each loop, measured in blocks, in turn."""
    times: list[list[float]] = [[] for _ in loops]
    for turn in range(ROUNDS + 1):
        for which, loop in enumerate(loops):
            began = time.perf_counter()
            for _ in range(BLOCK):
                loop()
            if turn:
                times[which].append((time.perf_counter() - began) / BLOCK)
    return [statistics.median(column) for column in times]


def parts():
    """Give a tiny model, a batch and a criterion."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    return model, torch.randn(32, 16), torch.randint(0, 10, (32,)), nn.CrossEntropyLoss()


def bare(fused=False):
    import torch

    model, x, y, criterion = parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **({"fused": True} if fused else {}))

    def step():
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(ctx):
    import torch

    model, x, y, criterion = parts()
    model = ctx.prepare(model)
    optimizer = ctx.optimizer(torch.optim.AdamW, model, lr=1e-4)
    log = ctx.metrics.log if hasattr(ctx, "metrics") else None

    def step():
        with ctx.accumulate(model, steps=1), ctx.autocast():
            loss = criterion(model(x), y)
            ctx.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if log is not None:
            log(loss=loss)

    return step


def peers():
    """Give the loops of the libraries that are installed."""
    found = {}
    warnings.simplefilter("ignore")
    for name, make in (("Lightning Fabric", fabric), ("Accelerate", accelerate)):
        try:
            found[name] = make()
        except ImportError as error:
            print(f"{name} is not measured: {error}", flush=True)
    return found


def fabric():
    import torch
    from lightning.fabric import Fabric

    model, x, y, criterion = parts()
    library = Fabric(accelerator="cpu", devices=1)
    model, optimizer = library.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def step():
        loss = criterion(model(x), y)
        library.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def accelerate():
    import torch
    from accelerate import Accelerator

    model, x, y, criterion = parts()
    library = Accelerator(cpu=True)
    model, optimizer = library.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def step():
        with library.accumulate(model):
            loss = criterion(model(x), y)
            library.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
