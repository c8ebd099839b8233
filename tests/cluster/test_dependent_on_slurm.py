"""A training that must leave a job which may not be requeued continues in a second job."""

from __future__ import annotations

import re
from typing import Any

from slurm_cluster import SlurmCluster
from trainings import OPTIONS, assert_it_went_on_where_it_left, both, undisturbed

from exact_runs import weights_in


def test_a_warned_job_that_may_not_be_requeued_goes_on_in_another(lab: Any, slurm: SlurmCluster) -> None:
    """It takes more than 10 s: the job waits for its warning, and each attempt imports torch."""
    trainings = both(lab, slurm, "--directive=--no-requeue")
    firsts = [training.trains() for training in trainings]
    for first in firsts:
        assert slurm.job(int(first))["Requeue"] == "0"
        slurm.run("scancel", "--signal=USR1", "--batch", first)
    for training, first in zip(trainings, firsts, strict=True):
        second = training.trains(attempt=1)
        assert second not in firsts
        assert slurm.job(int(first))["JobState"] == "FAILED"  # It has left by itself, before anybody ended it.
        decision = training.decision(0)
        assert (decision["again"], decision["how"], decision["job"]) == (True, "dependent", second)
    for training in trainings:
        assert weights_in(training.end()) == undisturbed(lab, *OPTIONS)
        assert_it_went_on_where_it_left(training)
        assert training.attempts == 2
        told = re.findall(r"^(?:job|attempts) +(.*)$", lab("status", training.run.name).stdout, re.MULTILINE)
        assert told == [training.job(1), "2"]
