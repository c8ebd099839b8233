"""A training on Slurm that is taken off its nodes, in every way there is, ends as if nothing had happened."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster

from allranks import contract
from exact_runs import SCRIPT, undisturbed, weights_in

#: 800 steps.
OPTIONS = ("--epochs", "100", "--size", "96", "--every", "5", "--quiet")


@dataclass
class Training:
    """A training with a rank on each of its nodes, slow until it is let go.

    Attributes:
        lab: the command, in a folder that knows the cluster.
        slurm: the cluster.
        flags: of the run.
    """

    lab: Any
    slurm: SlurmCluster
    flags: tuple[str, ...]

    def __post_init__(self) -> None:
        number = len(self.lab.runs())
        self.lab.env["OMP_NUM_THREADS"] = "1"  # Sums are rounded as their parts are shared by threads.
        self.checkpoints = self.lab.folder / f"checkpoints-{number}"
        flags = ("--on", "lab", "--nproc-per-node", "1", *self.flags)
        script = ("--folder", self.checkpoints.name, "--slow-until", "go", *OPTIONS)
        self.process = self.lab.popen("run", SCRIPT, *flags, "--", *script)
        self.run: Path = self.slurm.wait_until("the run", lambda: self.lab.runs()[number:])[0]

    def trains(self, attempt: int = 0, seconds: float = 90) -> int:
        """Wait until an attempt has saved; return its job."""
        self.slurm.wait_until(f"a checkpoint of attempt {attempt}", lambda: attempt in self._saved(), seconds)
        return int((self.run / contract.attempt_dir(attempt) / contract.JOB).read_text())

    def end(self) -> str:
        """Let it go on at full speed, and return what it has printed when it has ended well."""
        (self.lab.folder / "go").touch()
        out, err = self.process.communicate(timeout=150)
        assert self.process.returncode == 0, err.decode()
        assert self.lab.record(self.run)["status"]["state"] == "SUCCEEDED"
        return str(out.decode())

    @property
    def attempts(self) -> int:
        """How many there were."""
        return len(list((self.run / contract.ATTEMPTS_DIR).iterdir()))

    def _saved(self) -> set[int]:
        try:
            lines = (self.run / contract.CHECKPOINTS_FILE).read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return set()
        noted = [json.loads(line) for line in lines if line.endswith("\n")]
        return {record["attempt"] for record in noted if record["path"]}


def both(lab: Any, slurm: SlurmCluster, *flags: str) -> list[Training]:
    """Train with both launchers at once, on two nodes each."""
    return [Training(lab, slurm, ("--nodes", "2", "--launcher", name, *flags)) for name in ("torchrun", "direct")]


def test_a_requeue_by_the_admin_changes_nothing(lab: Any, slurm: SlurmCluster) -> None:
    for training in (trainings := both(lab, slurm)):
        slurm.run("scontrol", "requeue", str(training.trains()))
    for training in trainings:
        training.trains(attempt=1)
    for training in trainings:
        assert weights_in(training.end()) == undisturbed(lab, *OPTIONS)
        assert training.attempts == 2


@pytest.mark.timeout(400)
def test_a_time_limit_hit_twice_changes_nothing(lab: Any, slurm: SlurmCluster) -> None:
    trainings = both(lab, slurm, "--time", "1min")
    for training in trainings:
        training.trains(attempt=2, seconds=300)
    for training in trainings:
        assert weights_in(training.end()) == undisturbed(lab, *OPTIONS)
        assert training.attempts >= 3  # One more on a machine so slow that the third has its time limit too.


def test_a_preempted_training_goes_on_when_it_has_nodes_again(lab: Any, slurm: SlurmCluster) -> None:
    trainings = both(lab, slurm, "--partition", "low")
    for training in trainings:
        training.trains()
    script = lab.script("#!/bin/bash\n:\n", "urgent.sh")
    urgent = slurm.sbatch("--partition=high", "--nodes=4", "--exclusive", script, folder=lab.folder)
    assert slurm.wait_for_state(urgent, seconds=60)["JobState"] == "COMPLETED"
    for training in trainings:
        training.trains(attempt=1)
    for training in trainings:
        assert weights_in(training.end()) == undisturbed(lab, *OPTIONS)
        assert training.attempts == 2


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("launcher", ["torchrun", "direct"])
def test_a_node_that_dies_costs_an_attempt(lab: Any, slurm: SlurmCluster, launcher: str, place: int) -> None:
    training = Training(lab, slurm, ("--nodes", "2", "--launcher", launcher))
    training.trains()
    slurm.kill_node(f"node{place + 1:02}")
    training.trains(attempt=1)
    assert weights_in(training.end()) == undisturbed(lab, *OPTIONS)
    assert training.attempts == 2


def test_an_elastic_training_goes_on_with_the_nodes_that_are_left(lab: Any, slurm: SlurmCluster) -> None:
    training = Training(lab, slurm, ("--nodes", "2:4"))
    training.trains()
    slurm.kill_node("node03")
    folder = training.run / contract.node_dir(0, 0)
    slurm.wait_until("ranks on three nodes", lambda: worlds(folder / contract.AGENT_EVENTS) == [4, 3], 60)
    out = training.end()
    assert weights_in(out)[0] == 800
    assert training.attempts == 1


def worlds(events: Path) -> list[int]:
    """Return the world sizes of the generations that an agent has started."""
    found = [json.loads(line) for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [event["world_size"] for event in found if event["kind"] == contract.RANKS_STARTED]


def test_a_run_that_is_put_back_too_often_is_given_up(lab: Any, slurm: SlurmCluster) -> None:
    lab.script("import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    lab.job("script: train.py\ncluster: lab\nretry: {max_attempts: 2}\n")
    process = lab.popen("run", "job.yaml")
    for attempt in (0, 1):
        log = "runs/latest/" + contract.node_dir(attempt, 0) + "/rank-0.out"
        slurm.wait_until("the rank", lambda log=log: lab.runs() and (lab.folder / log).exists(), 60)
        slurm.run("scontrol", "requeue", (lab.run() / contract.attempt_dir(attempt) / contract.JOB).read_text().strip())
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "there were 2 attempts: 2 are allowed (retry.max_attempts)" in err.decode()
    assert lab.record()["status"]["state"] == "FAILED"


def test_a_cancelled_run_is_resumed(lab: Any, slurm: SlurmCluster) -> None:
    training = Training(lab, slurm, ("--nodes", "2"))
    training.trains()
    assert lab("cancel", timeout=60).rc == 0
    training.process.communicate(timeout=60)
    (lab.folder / "go").touch()
    done = lab("resume", timeout=150)
    assert done.rc == 0, done.stderr
    assert training.attempts == 2
    assert lab.record()["status"]["state"] == "SUCCEEDED"
    assert weights_in(done.stdout) == undisturbed(lab, *OPTIONS)
