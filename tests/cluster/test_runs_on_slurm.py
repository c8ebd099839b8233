"""What is peculiar to runs on a real Slurm: what it refuses, what never starts, and its allocations."""

from __future__ import annotations

import re
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
    slurm.wait_until("status to say why", lambda: re.search("never|more nodes than", lab("status").stdout))
    assert "PENDING" in lab("status").stdout
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
