"""Runs on a real Slurm, as a person types them: all shapes, both launchers, what goes wrong, and how it is told."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from ranks_told import WHO, expected, who
from slurm_cluster import SlurmCluster


@pytest.mark.parametrize("launcher", ["torchrun", "direct"])
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 4), (2, 2), (4, 1)])
def test_ranks_are_where_they_were_asked_for(lab: Any, launcher: str, nodes: int, ranks: int) -> None:
    lab.script(WHO)
    flags = ("--nodes", str(nodes), "--gpus-per-node", str(ranks), "--launcher", launcher)
    done = lab("run", "train.py", "--on", "lab", *flags, timeout=170)
    assert done.rc == 0, done.stderr
    assert who(done.stdout) == expected([ranks] * nodes)
    record = lab.record()
    assert record["status"]["state"] == "SUCCEEDED"
    assert (record["nnodes"], record["world_size"]) == (nodes, nodes * ranks)


def test_a_rank_that_fails_on_one_node_is_named(lab: Any) -> None:
    lab.script("import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit('no data here')\ntime.sleep(100)\n")
    done = lab("run", "train.py", "--on", "lab", "--nodes", "2", timeout=120)
    assert done.rc == 1
    assert "error: rank 1 on node02 ended with exit code 1\n  why: no data here\n" in done.stderr
    assert lab.record()["status"]["state"] == "FAILED"


def test_a_wrong_partition_is_refused_in_words(lab: Any) -> None:
    lab.script(WHO)
    done = lab("run", "train.py", "--on", "lab", "--partition", "nothere")
    assert (done.rc, done.stdout) == (1, "")
    assert "nothere" in done.stderr
    assert "sinfo" in done.stderr


def test_too_many_nodes_are_told_and_cancelled(lab: Any, slurm: SlurmCluster) -> None:
    lab.script(WHO)
    done = lab("run", "train.py", "--on", "lab", "--nodes", "5", "--detach")
    assert done.rc == 0, done.stderr
    found = lab("status")
    assert "PENDING" in found.stdout
    assert "never" in found.stdout or "more nodes than" in found.stdout
    assert lab("cancel").rc == 0
    assert lab.record()["status"]["state"] == "CANCELLED"


def test_cancelling_leaves_nothing_on_the_nodes(lab: Any, slurm: SlurmCluster, assert_nothing_left: Any) -> None:
    lab.script("import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    process = lab.popen("run", "train.py", "--on", "lab", "--nodes", "2", "--gpus-per-node", "2")
    slurm.wait_until("all ranks", lambda: lab("logs", timeout=30).stdout.count("up") and lab.runs(), 60)
    assert lab("ps").stdout.splitlines()[-1].split()[1] == "RUNNING"
    assert lab("cancel", timeout=60).rc == 0
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "was cancelled" in err.decode()
    assert lab.record()["status"]["state"] == "CANCELLED"
    assert_nothing_left(lab.run(), 10)


def test_ctrl_c_cancels_the_job(lab: Any, slurm: SlurmCluster) -> None:
    lab.script("import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    process = lab.popen("run", "train.py", "--on", "lab")
    slurm.wait_until("the rank", lambda: lab.runs() and "up" in lab("logs", timeout=30).stdout, 60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert lab.record()["status"]["state"] == "CANCELLED"


def test_a_job_that_somebody_cancels_ends_the_run(lab: Any, slurm: SlurmCluster) -> None:
    lab.script("import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    process = lab.popen("run", "train.py", "--on", "lab", "--nodes", "2")
    slurm.wait_until("the rank", lambda: lab.runs() and "up" in lab("logs", timeout=30).stdout, 60)
    slurm.run("scancel", (lab.run() / "attempts" / "000" / "job").read_text().strip())
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err.decode()
    assert lab.record()["status"]["state"] == "CANCELLED"
    assert len(list((lab.run() / "attempts").iterdir())) == 1


def test_a_detached_run_is_found_again(lab: Any) -> None:
    lab.script(WHO)
    started = lab("run", "train.py", "--on", "lab", "--nodes", "2", "--detach")
    assert started.rc == 0, started.stderr
    assert started.stdout.strip() == lab.run().name
    followed = lab("logs", "-f", timeout=120)
    assert who(followed.stdout) == expected([1, 1])
    assert "SUCCEEDED" in lab("status").stdout


def test_the_script_runs_when_a_person_submits_it(lab: Any, slurm: SlurmCluster) -> None:
    lab.script(WHO)
    written = lab("plan", "train.py", "--on", "lab", "--nodes", "2", "-o", "job.sbatch")
    assert written.rc == 0, written.stderr
    job = slurm.sbatch("job.sbatch", folder=lab.folder)
    assert slurm.wait_for_state(job, seconds=90)["JobState"] == "COMPLETED"
    logs = sorted(lab.folder.glob("runs/*/attempts/000/node-*/rank-*.out"))
    assert who("".join(log.read_text() for log in logs)) == expected([1, 1])


def test_inside_an_allocation_its_nodes_are_used(lab: Any, slurm: SlurmCluster) -> None:
    lab.script(WHO)
    inner = Path("inner.sh")
    lab.script("#!/bin/bash\nallranks run train.py --backend gloo\n", str(inner))
    job = slurm.sbatch("--nodes=2", "--gpus-per-node=2", str(inner), folder=lab.folder)
    assert slurm.wait_for_state(job, seconds=120)["JobState"] == "COMPLETED"
    said = (lab.folder / f"slurm-{job}.out").read_text()
    assert who(said) == expected([2, 2])
