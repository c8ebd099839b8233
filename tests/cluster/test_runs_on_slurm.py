"""What is peculiar to runs on a real Slurm: what it refuses, what never starts, and its allocations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks_told import PLACES, expected, who
from slurm_cluster import SlurmCluster


def test_a_wrong_partition_is_refused_in_words(lab: Any) -> None:
    lab.script(PLACES)
    done = lab("run", "train.py", "--on", "lab", "--partition", "nothere")
    assert (done.rc, done.stdout) == (1, "")
    assert "nothere" in done.stderr
    assert "sinfo" in done.stderr


def test_too_many_nodes_are_told_and_cancelled(lab: Any, slurm: SlurmCluster) -> None:
    lab.script(PLACES)
    done = lab("run", "train.py", "--on", "lab", "--nodes", "5", "--detach")
    assert done.rc == 0, done.stderr
    found = lab("status")
    assert "PENDING" in found.stdout
    assert "never" in found.stdout or "more nodes than" in found.stdout
    assert lab("cancel").rc == 0
    assert lab.record()["status"]["state"] == "CANCELLED"


def test_inside_an_allocation_its_nodes_are_used(lab: Any, slurm: SlurmCluster) -> None:
    lab.script(PLACES)
    inner = Path("inner.sh")
    lab.script("#!/bin/bash\nallranks run train.py --backend gloo\n", str(inner))
    job = slurm.sbatch("--nodes=2", "--gpus-per-node=2", str(inner), folder=lab.folder)
    assert slurm.wait_for_state(job)["JobState"] == "COMPLETED"
    said = (lab.folder / f"slurm-{job}.out").read_text()
    assert who(said) == expected([2, 2])
