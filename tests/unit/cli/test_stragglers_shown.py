"""A rank for which the others wait is named while the run runs, with what it takes its time for."""

from __future__ import annotations

import re
from typing import Any

from allranks.clusters.registry import load_kind
from allranks.runs.record import load
from allranks.runs.stragglers import inspect
from allranks.runs.usage import Workers, node_usage, workers_of
from allranks.view.feed import Feed
from waiting import PATIENCE, wait_for

#: Rank 1 computes slowly, until there is a file; then rank 2 waits for its data.
TRAINING = """\
import os, time
import torch
import allranks
from allranks.runtime import steptime

steptime._WINDOW_SECONDS = 0.01  # A window for each step.
rank = int(os.environ["RANK"])
state = {"turned": 0}


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.12 if rank == 2 and state["turned"] else 0.001)
        return torch.ones(4)


class Model(torch.nn.Linear):
    def forward(self, batch):
        time.sleep(0.12 if rank == 1 and not state["turned"] else 0.001)
        return super().forward(batch)


with allranks.init(backend="gloo") as ctx:
    model = ctx.prepare(Model(4, 1))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=1e-3)
    for batch in ctx.loader(Samples(), batch_size=1, workers=0, quiet=True):
        ctx.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        state["turned"] += bool(ctx.control.agree(os.path.exists("turn"))[0])
        if state["turned"] > 45:
            break
"""


def test_the_slow_rank_of_a_training_is_named_and_why(allranks: Any) -> None:
    """It takes 10 s or more: to be sure of a rank takes many steps, which must be slow on any machine."""
    allranks.script(TRAINING)
    process = allranks.popen("run", "train.py", "--nproc-per-node", "3")
    wait_for("the run", (allranks.folder / "runs" / "latest").exists)
    shown = wait_for("the straggler", lambda: _line(allranks("status").stdout))
    assert shown.startswith("rank 1 on ")
    assert " times slower for " in shown
    watched = Feed(load(allranks.runs()[-1]), load_kind("local")).read()
    assert watched.delay.startswith("rank 1 on ")
    (allranks.folder / "turn").touch()
    assert (process.communicate(timeout=PATIENCE), process.returncode)[1] == 0
    (sentence,), _ = inspect(load(allranks.runs()[-1]).attempt_folder)
    assert re.match(r"rank 2 on \S+ waits for data for \d+ steps: ", sentence)
    assert _line(allranks("status").stdout) is None, "it has ended"


#: Two workers fetch batches, and compute all the time that they get a CPU.
LOADING = """\
import time
import torch
import allranks


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        return torch.ones(4)


with allranks.init(backend="gloo") as ctx:
    for batch in ctx.loader(Samples(), batch_size=1, workers=2, quiet=True):
        pass
"""


def test_the_workers_of_a_rank_are_counted_and_measured(allranks: Any) -> None:
    """It takes 10 s or more: workers start, and a rate takes two samples."""
    allranks.script(LOADING)
    process = allranks.popen("run", "train.py")
    wait_for("the run", (allranks.folder / "runs" / "latest").exists)
    attempt = load(allranks.runs()[-1]).attempt_folder

    def measured() -> Workers | None:
        return workers_of(attempt, {each["node"]: each for each in node_usage(attempt)}, {0: [0]})

    def both_are_busy() -> Workers | None:
        found = measured()
        return found if found and found.count == 2 and found.cpus + found.queued > 1.0 else None

    workers = wait_for("two workers that wait for nothing but a CPU", both_are_busy)
    assert 0 < workers.cpus < 2.2
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert (allranks.runs()[-1] / "attempts/000/node-000/usage.bin").read_bytes().startswith(b"usage 1\n")


def _line(status: str) -> str | None:
    lines = [line.removeprefix("straggler").strip() for line in status.splitlines() if line.startswith("straggler")]
    return lines[0] if lines else None
