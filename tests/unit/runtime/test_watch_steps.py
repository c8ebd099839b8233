"""Ranks that disagree on the number of steps are named, and those that agree are left alone."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from allranks import RankError
from allranks.runtime.peers import StepWatch
from allranks.runtime.progress import Progress

TRAINING = """
import torch, allranks
with allranks.init(timeout=100) as ctx:
    model = ctx.prepare(torch.nn.Linear(2, 1))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    def train(steps):
        for _ in range(steps):
            ctx.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize("steps", [(4, 3), (3, 4), (3, 7)])
def test_a_rank_that_has_left_is_named(run_ranks, steps):
    results = run_ranks(f"{TRAINING}    train({steps}[ctx.rank])\n")
    early, late = (0, 1) if steps[0] < steps[1] else (1, 0)
    what = (
        f"ranks disagree on the number of steps: rank {early} has left the training loop and closed its context "
        f"after 3 backward passes, rank {late} has started 4"
    )
    assert [code for code, _, _ in results] == [1, 1]
    assert results[late][2].startswith(f"error: {what}\n  why: a backward pass waits for all ranks")
    # Rank 0 serves the store: when it is the late one, rank 1 may see the end of it first.
    assert f"RankError: {what}" in results[early][2]


@pytest.mark.parametrize("strategy", ["flat", "ddp"])
def test_plain_backward_passes_are_counted_too(run_ranks, strategy):
    script = TRAINING.replace("ctx.backward(model(torch.ones(1, 2)).sum())", "model(torch.ones(1, 2)).sum().backward()")
    script = script.replace("Linear(2, 1))", f"Linear(2, 1), strategy={strategy!r})")
    results = run_ranks(f"{script}    train((3, 4)[ctx.rank])\n")
    assert [code for code, _, _ in results] == [1, 1]
    assert (
        "rank 0 has left the training loop and closed its context after 3 backward passes, rank 1 has started 4"
        in (results[1][2])
    )


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_is_in_on_main_is_named(run_ranks, early):
    lines = f"    train(3 if ctx.rank == {early} else 5)\n    ctx.on_main(lambda: None)\n"
    results = run_ranks(TRAINING + lines)
    doing = "waits" if early else "runs"
    text = f"rank {early} {doing} in ctx.on_main(<lambda>) after 3 backward passes, rank {1 - early} has started 4"
    assert results[1 - early][0] == 1
    assert text.replace("runs in", "runs") in results[1 - early][2]


def test_ranks_that_agree_come_to_their_ends_at_different_times(run_ranks):
    script = f"""
import time
from allranks.runtime.peers import StepWatch
StepWatch.__init__.__defaults__ = (0.1,)  # Seconds between two looks.
{TRAINING}
    assert ctx._watch._seconds == 0.1
    train(3)
    if ctx.rank == 1:
        time.sleep(0.5)  # Longer than two looks.
    train(2)
    print(ctx.on_main(lambda: time.sleep(0.4)))
    train(1)
print("done")
"""
    assert [(code, out, err) for code, out, err in run_ranks(script)] == [(0, "None\ndone\n", "")] * 2


def test_different_numbers_at_the_end_are_told(capsys):
    store = HashStore()
    watches = [StepWatch(rank, 2, Progress(backwards=3 + rank), store) for rank in (0, 1)]
    for watch in watches:
        watch.arrive("waits in ctx.on_main(evaluate)")
    assert capsys.readouterr().err == "allranks: warning: rank 0 has made 3 backward passes, rank 1 4\n"
    first = threading.Thread(target=watches[0].leave, args=(timedelta(seconds=60),))
    first.start()
    watches[1].leave(timedelta(seconds=60))
    first.join(60)
    assert not first.is_alive()


def test_a_verdict_is_raised_by_those_who_wait():
    store = HashStore()
    watch = StepWatch(0, 2, Progress(), store)
    store.set("steps/verdict", '{"what": "ranks disagree", "why": null, "fix": null}')
    with pytest.raises(RankError, match="ranks disagree"):
        watch.leave(timedelta(seconds=60))


def test_leaving_waits_no_longer_than_the_timeout_nor_for_a_rank_that_failed():
    StepWatch(0, 2, Progress(), HashStore()).leave(timedelta(milliseconds=10))
    store = HashStore()
    store.set("all-left", "1")
    StepWatch(0, 2, Progress(), store).leave(timedelta(seconds=600))


def test_alone_nobody_watches():
    watch = StepWatch(0, 1, Progress(), HashStore())
    watch.start()
    watch.leave(timedelta(seconds=60))
    assert not [thread for thread in threading.enumerate() if thread.name == "allranks-steps"]
