"""What recording where the time of a step goes costs it: a small training, with the clock and with one that is off.

Then the calls of the clock in a step of two ranks by themselves, and what a window costs, of which there is one every
two seconds: its writing, and its part of the joining of old ones. Seconds are those of the CPU, and the bar is 15 µs a
step.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

STEPS, ROUNDS = 64, int(os.environ.get("BENCH_ROUNDS", "200"))


class Off:
    """The clock of a rank that records nothing."""

    def enter(self, phase: int) -> int:
        return phase

    def count(self, step: int, place: object = None) -> None:
        pass

    def close(self, step: int) -> None:
        pass

    @contextmanager
    def during(self, phase: int):
        yield


def training(ctx, clock):
    """Give a function that returns the seconds of a step."""
    import torch

    model = torch.nn.Linear(16, 10)
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=1e-4)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.randn(64, 16)), batch_size=4, quiet=True)

    def run() -> float:
        ctx.progress.clock = clock
        steps, began = 0, time.process_time()
        while steps < STEPS:
            for (batch,) in loader:
                ctx.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        return (time.process_time() - began) / steps

    return run


def calls(folder: Path, every: int, steps: int) -> float:
    """Return the seconds of CPU a step of what two ranks call, with a window for ``every`` steps."""
    from allranks.runtime import steptime

    os.environ["ALLRANKS_STEP_FILE"] = str(folder / f"rank-{every}.step")
    clock = steptime.StepClock()
    clock.connect(0)
    began = time.process_time()
    for step in range(steps):
        for phase in (0, 1, 1, 2, 1, 1, 3, 5):  # Loader, forward, exchange, backward, optimizer.
            clock.enter(phase)
        if step % every == 0:
            clock._due = 0.0
        clock.count(step + 1)
    clock.close(steps)
    return (time.process_time() - began) / steps


def main() -> None:
    import torch

    import allranks
    from allranks.runtime.steptime import StepClock

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="allranks-bench-") as name:
        os.environ["ALLRANKS_RUN_DIR"] = name
        alone = calls(Path(name), 10**9, 500_000)
        window = calls(Path(name), 1, 5_000) - alone
        with allranks.init(seed=1) as ctx:
            clock = StepClock()
            clock.connect(0)
            on, off = training(ctx, clock), training(ctx, Off())
            on(), off()
            pairs = [(on(), off()) if turn % 2 else (off(), on())[::-1] for turn in range(ROUNDS)]
    recorded, plain = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
    costs = statistics.median(one - other for one, other in pairs) * 1e6
    print(f"a step recorded {recorded:.1f} µs, not recorded {plain:.1f} µs: {costs:.1f} µs (bar: 15 µs)")
    print(f"the clock's calls alone: {alone * 1e6:.2f} µs a step; a window: {window * 1e6:.0f} µs")


if __name__ == "__main__":
    main()
