"""A rank for which the others wait is named while the run runs, with what it takes its time for."""

from __future__ import annotations

import re
from typing import Any

from allranks.clusters.registry import load_kind
from allranks.runs.record import load
from allranks.runs.stragglers import current
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
    (sentence,) = current(load(allranks.runs()[-1]).attempt_folder)
    assert re.match(r"rank 2 on \S+ waits for data for \d+ steps: ", sentence)
    assert _line(allranks("status").stdout) is None, "it has ended"


def _line(status: str) -> str | None:
    lines = [line.removeprefix("straggler").strip() for line in status.splitlines() if line.startswith("straggler")]
    return lines[0] if lines else None
