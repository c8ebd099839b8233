"""A job with a least and a most number of nodes starts with those that are free."""

from __future__ import annotations

from typing import Any

from ranks_told import PLACES, expected, who
from slurm_cluster import SlurmCluster


def test_it_starts_with_the_nodes_that_are_free(lab: Any, slurm: SlurmCluster) -> None:
    others = ("--nodelist=node[03-04]", "--nodes=2", "--exclusive")
    busy = slurm.sbatch(*others, "--wrap=sleep 600", folder=lab.folder)
    slurm.wait_for_state(busy, "RUNNING")
    lab.script(PLACES)
    done = lab("run", "train.py", "--on", "lab", "--nodes", "2:4", "--nproc-per-node", "2")
    assert done.rc == 0, done.stderr
    assert who(done.stdout) == expected([2, 2])
    assert slurm.job(busy)["JobState"] == "RUNNING"
    assert (lab.record()["nnodes"], lab.record()["world_size"]) == (2, 4)
