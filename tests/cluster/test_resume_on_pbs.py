"""A training on PBS that is taken off its nodes, in every way there is, ends as if nothing had happened."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from followed_runs import follow, hosts_of
from left_behind import assert_nothing_lives
from pbs_cluster import PbsCluster, StandInPbs
from trainings import OPTIONS, SCRIPT, Training, assert_it_went_on_where_it_left, both, undisturbed

from allranks import contract
from exact_runs import weights_in
from waiting import PATIENCE

#: A rank that hears no warning.
DEAF = "import time\nprint('up', flush=True)\ntime.sleep(1000)\n"
#: The training, whose second rank ends once there is a file ``fail``.
FAILS = f"""\
import os, runpy, threading, time
def watch():
    while not os.path.exists("fail"):
        time.sleep(0.05)
    os._exit(3)
if os.environ["RANK"] == "1":
    threading.Thread(target=watch, daemon=True).start()
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
#: Saves its first step, and asks for another attempt again and again.
FRUITLESS = """\
import torch
import allranks
with allranks.init() as ctx:
    model = ctx.prepare(torch.nn.Linear(1, 1))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    checkpoints = ctx.checkpoints("fruitless", every=1, background=False, model=model, optimizer=optimizer)
    if checkpoints.resumed is None:
        ctx.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        checkpoints.step()
raise SystemExit(75)
"""
LATER = "it was stopped on request, and is to be continued"


def told(lab: Any, run: str) -> dict[str, str]:
    """Return what is shown of a run."""
    return dict(re.findall(r"^(\w+(?: \w+)?)  +(.*)$", lab("status", run).stdout, re.MULTILINE))


def test_a_job_that_leaves_by_itself_goes_on_under_its_id(standin_lab: Any, standin: StandInPbs) -> None:
    """If it may put itself back, which only operators may on most sites.

    It takes more than 10 s: both attempts import torch on two nodes.
    """
    standin.set(operator=True)
    warned = Training(standin_lab, standin, ("--nodes", "2"))
    job = warned.trains()
    warn(standin, warned)
    assert warned.trains(attempt=1) == job
    assert [f"{number}.pbsctl" for number in standin.jobs()] == [job]  # Nothing is submitted besides.
    assert weights_in(warned.end()) == undisturbed(standin_lab, *OPTIONS)
    assert_it_went_on_where_it_left(warned)
    shown = told(standin_lab, warned.run.name)
    assert (shown["job"], shown["attempts"]) == (job, "2")
    decision = warned.decision(0)
    found = (decision["again"], decision["how"], decision["job"], decision["why"])
    assert found == (True, "requeue", job, LATER)
    assert_nothing_lives(standin, standin_lab)


def shows_a_later_job(training: Training) -> bool:
    """Whether the job that is shown is that of the newest attempt: the third, if the second is over by now."""
    shown = told(training.lab, training.run.name)
    newest = int(shown["attempts"]) - 1
    return newest > 0 and shown["job"] == training.job(newest)


def warn(standin: StandInPbs, training: Training) -> None:
    """Warn the nodes of a training as its script does before the time limit."""
    for number, host in enumerate(hosts_of(standin, training.job(0))):
        pids = training.run / contract.node_dir(0, number) / "*.pid"
        standin.run_on(host, ["sh", "-c", f"kill -s USR1 $(cat {pids}) || true"])  # It may have left already.


@pytest.mark.timeout(900)
def test_a_time_limit_changes_nothing(pbs_lab: Any, pbs: PbsCluster) -> None:
    """Without an operator's rights, which users have on few sites, the run continues in another job: so on a stand-in.

    It takes more than 10 s: each attempt lasts until its time limit.
    """
    limit = ("--time", "80s")  # They are warned after half of it, and must have saved and left in the other half.
    flags = ("--nodes", "2", *limit)
    last = Training(pbs_lab, pbs, (*flags, "--no-requeue"))
    trainings = both(pbs_lab, pbs, *limit)
    firsts = [training.trains() for training in trainings]
    pbs_lab.script(DEAF)
    deaf = follow(pbs_lab, "deaf", "train.py", "--time", "20s").end()  # Room for a slow machine to start it.
    name = deaf.folder.name
    assert (deaf.rc, told(pbs_lab, name)["state"]) == (143, "TIMEOUT  F (finished)")
    out_of_time = (
        rf"error: {name} TIMEOUT: it reached its time limit: raise resources\.time\n"
        rf"  why: =>> PBS: job killed: walltime \d+ exceeded limit 20\n"
        rf"  fix: raise resources\.time, or let the run save and continue: allranks resume {name} \(no check[^\n]+\n"
        rf"  see: runs/{name}/pbs\.out\n"
    )
    assert re.search(out_of_time, deaf.stderr), deaf.stderr
    seconds = [training.trains(attempt=1) for training in trainings]
    for training, first, second in zip(trainings, firsts, seconds, strict=True):
        decision = training.decision(0)
        how = "requeue" if second == first else "dependent"  # On a real one we may be an operator.
        assert (decision["again"], decision["how"], decision["job"]) == (True, how, second)
        if how == "dependent":
            assert second not in firsts
            assert pbs.wait_for_state(first)["Exit_status"] == "75"  # It has left by itself, before anybody ended it.
        pbs.wait_until("the newest attempt's job", lambda training=training: shows_a_later_job(training))
    _, err = last.process.communicate(timeout=PATIENCE)
    assert (last.process.returncode, last.state, last.attempts) == (75, "PREEMPTED", 1), err.decode()
    assert not (last.run / contract.attempt_dir(0) / contract.AGAIN).exists()
    for training in trainings:
        assert weights_in(training.end()) == undisturbed(pbs_lab, *OPTIONS)
        assert_it_went_on_where_it_left(training)
    assert_nothing_lives(pbs, pbs_lab)


def test_a_training_that_somebody_ends_is_resumed_when_asked_for(pbs_lab: Any, pbs: PbsCluster) -> None:
    """It is saving when it is ended, and does not come back by itself.

    It takes more than 10 s: two trainings and their continuations import torch on two nodes each.
    """
    deleted = Training(pbs_lab, pbs, ("--nodes", "2", "--launcher", "direct"))
    failed = Training(pbs_lab, pbs, ("--nodes", "2"), pbs_lab.script(FAILS))
    trainings = (deleted, failed)
    firsts = [training.trains() for training in trainings]
    if isinstance(pbs, StandInPbs):
        pbs.set(kill_delay=PATIENCE)  # PBS gives it 10 s, in which a busy machine does not save.
    pbs.run("qdel", firsts[0])
    pbs_lab.script("", "fail")
    said = [training.process.communicate(timeout=PATIENCE)[1].decode() for training in trainings]
    ends = [(training.process.returncode, training.state, training.attempts) for training in trainings]
    assert ends == [(143, "CANCELLED", 1), (3, "FAILED", 1)], said
    assert f"allranks: {deleted.run.name} was cancelled" in said[0]
    if not pbs.is_real:  # That may kill the script as soon as the ranks have left.
        decision, why = deleted.decision(0), f"{LATER}, but PBS is ending the job already"
        assert (decision["again"], decision["given_up"], decision["why"]) == (False, True, why)
    assert failed.decision(0)["why"] == "it exited with code 3, and is not retried"
    assert pbs.jobs() == []
    assert_nothing_lives(pbs, pbs_lab)
    (pbs_lab.folder / "fail").unlink()
    for training in trainings:
        training.resume()
    for training, first in zip(trainings, firsts, strict=True):
        assert weights_in(training.end()) == undisturbed(pbs_lab, *OPTIONS)
        shown = told(pbs_lab, training.run.name)
        assert (shown["job"], shown["attempts"]) == (training.job(1), "2")
        assert training.job(1) != first
        assert next(note["step"] for note in training.notes() if note["attempt"] == 1) > 0
    assert_it_went_on_where_it_left(deleted)
    assert_nothing_lives(pbs, pbs_lab)


def test_a_run_that_asks_too_often_is_given_up(pbs_lab: Any, pbs: PbsCluster) -> None:
    """It takes more than 10 s: each attempt is a job whose ranks import torch."""
    pbs_lab.script("raise SystemExit(75)\n", "often.py")
    pbs_lab.script(FRUITLESS, "fruitless.py")
    pbs_lab.job("script: often.py\nretry: {max_attempts: 2}\n", "often.yaml")
    often, fruitless = (follow(pbs_lab, "often", "often.yaml"), follow(pbs_lab, "fruitless", "fruitless.py"))
    reasons = [
        (often, 2, "there were 2 attempts: 2 are allowed (retry.max_attempts)"),
        (fruitless, 4, "3 attempts in a row came no further than step 1"),
    ]
    for run, attempts, why in reasons:
        assert run.end().rc == 75, run.stderr
        assert f"error: {run.folder.name} is to be continued\n  why: {LATER}, but {why}\n" in run.stderr
        assert told(pbs_lab, run.folder.name)["attempts"] == str(attempts)
        assert len([*(run.folder / contract.ATTEMPTS_DIR).iterdir()]) == attempts
        decision = json.loads((run.folder / contract.attempt_dir(attempts - 1) / contract.AGAIN).read_text())
        assert (decision["again"], decision["given_up"]) == (False, True)
    assert pbs.jobs() == []
    assert_nothing_lives(pbs, pbs_lab)
