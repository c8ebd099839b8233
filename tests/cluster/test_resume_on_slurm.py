"""A training on Slurm that is taken off its nodes, in every way there is, ends as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster
from trainings import OPTIONS, Training, both, undisturbed

from allranks import contract
from exact_runs import weights_in
from waiting import PATIENCE


@pytest.mark.timeout(900)
def test_a_time_limit_hit_twice_changes_nothing(lab: Any, slurm: SlurmCluster) -> None:
    """It takes more than 10 s: Slurm looks at time limits twice a minute."""
    trainings = both(lab, slurm, "--time", "1min")
    for training in trainings:
        job = training.trains(attempt=2)
        # Slurm may warn up to a minute early: later attempts could end at their first step, until none is left.
        slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    for training in trainings:
        assert weights_in(training.end()) == undisturbed(lab, *OPTIONS)
        assert training.attempts >= 3  # One more if the third was warned before its limit was raised.


def test_a_preempted_training_goes_on_when_it_has_nodes_again(lab: Any, slurm: SlurmCluster) -> None:
    """It takes more than 10 s: a requeued job waits 11 s, and each attempt imports torch."""
    trainings = both(lab, slurm, "--partition", "low")
    for training in trainings:
        training.trains()
    script = lab.script("#!/bin/bash\n:\n", "urgent.sh")
    urgent = slurm.sbatch("--partition=high", "--nodes=4", "--exclusive", script, folder=lab.folder)
    assert slurm.wait_for_state(urgent)["JobState"] == "COMPLETED"
    for training in trainings:
        training.trains(attempt=1)
    for training in trainings:
        assert weights_in(training.end()) == undisturbed(lab, *OPTIONS)
        # Slurm may start one again while the other one still leaves, and preempt it once more.
        restarts = int(slurm.job(int(training.job(0)))["Restarts"])
        assert (restarts >= 1, training.attempts) == (True, 1 + restarts)


def test_an_elastic_training_goes_on_with_the_nodes_that_are_left(lab: Any, slurm: SlurmCluster) -> None:
    """It takes more than 10 s: a training imports torch on three nodes."""
    training = Training(lab, slurm, ("--nodes", "2:3"))
    training.trains()
    slurm.kill_node("node03")
    folder = training.run / contract.node_dir(0, 0)
    slurm.wait_until("ranks on two nodes", lambda: worlds(folder / contract.AGENT_EVENTS) == [3, 2])
    out = training.end()
    assert weights_in(out)[0] == 240
    assert training.attempts == 1


def worlds(events: Path) -> list[int]:
    """Return the world sizes of the generations that an agent has started."""
    found = [json.loads(line) for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [event["world_size"] for event in found if event["kind"] == contract.RANKS_STARTED]


def test_a_run_that_is_put_back_too_often_is_given_up(lab: Any, slurm: SlurmCluster) -> None:
    """It takes more than 10 s: the job is requeued twice, and waits 11 s each time."""
    lab.script("import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    lab.job("script: train.py\ncluster: lab\nretry: {max_attempts: 2}\n")
    process = lab.popen("run", "job.yaml")
    for attempt in (0, 1):
        log = "runs/latest/" + contract.node_dir(attempt, 0) + "/rank-0.out"
        slurm.wait_until("the rank", lambda log=log: lab.runs() and (lab.folder / log).exists())
        slurm.run("scontrol", "requeue", (lab.run() / contract.attempt_dir(attempt) / contract.JOB).read_text().strip())
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "there were 2 attempts: 2 are allowed (retry.max_attempts)" in err.decode()
    assert lab.record()["status"]["state"] == "FAILED"
