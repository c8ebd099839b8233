"""What a check finds on a real Slurm: what it would refuse, and what is wrong on its nodes before anybody has them."""

from __future__ import annotations

import json
import platform
import re
import signal
import sys
from typing import Any

import pytest
from slurm_cluster import SlurmCluster

from waiting import PATIENCE


def checked(lab: Any, *flags: str, **options: Any) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Check with --json; return the exit code, and the findings of each check."""
    lab.script("print('never run')\n")
    done = lab("check", "train.py", "--on", "lab", "--json", *flags, timeout=PATIENCE, **options)
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(done.stdout)["checks"]:
        found.setdefault(finding["check"], []).append(finding)
    return done.rc, found


def nothing_left(lab: Any, slurm: SlurmCluster) -> bool:
    """Return whether no job is in the queue, and no run on record."""
    return not slurm.run("squeue", "--noheader").strip() and not lab.runs()


def test_a_healthy_cluster(lab: Any, slurm: SlurmCluster) -> None:
    code, found = checked(lab, "--nodes", "4")
    bad = [finding for each in found.values() for finding in each if finding["grade"] in ("WARN", "FAIL")]
    assert (code, bad) == (0, [])
    assert [finding["host"] for finding in found["nodes"]] == slurm.nodes
    (scheduler,) = found["scheduler"]
    assert (scheduler["grade"], scheduler["what"]) == ("PASS", "partition main: the job could start now")
    (reach,) = found["reach"]
    assert re.match(r"3 of 3 reach node01 at port [1-9]\d+, there and back in ", reach["what"])
    assert nothing_left(lab, slurm)


def test_ranks_are_tried_on_the_nodes_that_were_looked_at(lab: Any, slurm: SlurmCluster) -> None:
    """It takes more than 10 s: ranks import torch on each node, measure, and train."""
    names = ("nodes", "all-reduce", "training", "culprit")
    code, found = checked(lab, "--full", "--only", ",".join(names), "--nodes", "2", "--nproc-per-node", "1")
    *grades, culprit = (found[name][0]["grade"] for name in names)
    assert (code, grades) == (0, ["PASS", "PASS", "PASS"]), found
    assert culprit in ("SKIP", "PASS"), found  # A link that was slow for a moment, beside other tests, is tried again.
    jobs = slurm.run("squeue", "--states=all", "--sort=-i", "--noheader", "--format=%j %n").splitlines()
    tried = [["test", "node[01-02]"]] * (2 if culprit == "PASS" else 1)
    assert [line.split() for line in jobs[: len(tried) + 1]] == [*tried, ["check"]]
    assert nothing_left(lab, slurm)


def test_a_node_that_cannot_be_set_up_is_named_and_the_others_are_looked_at(lab: Any, slurm: SlurmCluster) -> None:
    line = 'node_setup: [\'[ "$SLURMD_NODENAME" != node02 ] || { echo "no scratch here" >&2; exit 9; }\']'
    (lab.folder / "job.yaml").write_text(f"script: train.py\nenvironment: {{{line}}}\n")
    lab.script("print('never run')\n")
    done = lab("check", "job.yaml", "--on", "lab", "--nodes", "3", "--only", "nodes", timeout=PATIENCE)
    assert done.rc == 3
    told = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "FAIL nodes node02: no scratch here" in told
    assert f"PASS nodes node[01,03]: Python {platform.python_version()}" in told
    assert nothing_left(lab, slurm)


@pytest.mark.parametrize(
    ("flags", "what", "fix"),
    [
        (
            ("--partition", "nothere"),
            "Slurm refuses the job: invalid partition specified: nothere; Invalid partition name specified",
            "set scheduler.partition (nothere) to one that sinfo --summarize lists and you may use",
        ),
        (
            ("--nodes", "5"),
            "5 nodes are requested, and partition main has 4",
            "lower resources.nodes to 4, or choose another scheduler.partition",
        ),
        (
            ("--time", "2:00:00"),
            "02:00:00 are requested, and partition main gives a job at most 01:00:00",
            "lower resources.time, or choose another scheduler.partition",
        ),
        (
            ("--gpus-per-node", "5"),
            "5 GPUs of each node are requested, and no node of partition main has more than 4 GPUs",
            "lower resources.gpus_per_node, or choose another scheduler.partition",
        ),
    ],
)
def test_what_could_never_start(lab: Any, slurm: SlurmCluster, flags: tuple[str, str], what: str, fix: str) -> None:
    code, found = checked(lab, "--only", "scheduler", *flags)
    (scheduler,) = found["scheduler"]
    assert (code, scheduler["grade"], scheduler["what"], scheduler["fix"]) == (3, "FAIL", what, fix)
    assert not slurm.run("squeue", "--noheader").strip()


@pytest.mark.usefixtures("checked")
def test_a_job_that_could_never_start_is_not_submitted(lab: Any, slurm: SlurmCluster) -> None:
    lab.script("print('never run')\n")
    done = lab("run", "train.py", "--on", "lab", "--nodes", "5")
    assert done.rc == 3
    assert done.stderr.splitlines()[-4:-1] == [
        "error: scheduler: 5 nodes are requested, and partition main has 4",
        "  why: a scheduler rejects a job that requests more than it has, or keeps it pending forever",
        "  fix: lower resources.nodes to 4, or choose another scheduler.partition; --no-check submits it all the same",
    ]
    assert not slurm.run("squeue", "--noheader").strip()
    status = lab.record()["status"]
    assert (status["state"], status["native"], status["exit_code"]) == ("FAILED", "not started", 3)
    submitted = lab("run", "train.py", "--on", "lab", "--nodes", "5", "--no-check", "--detach")
    assert submitted.rc == 0, submitted.stderr
    assert lab("cancel").rc == 0


@pytest.mark.usefixtures("checked")
def test_a_partition_that_is_not_there_is_told_by_the_submission(lab: Any) -> None:
    lab.script("print('never run')\n")
    done = lab("run", "train.py", "--on", "lab", "--partition", "nothere")
    assert (done.rc, "error: Slurm refuses the job\n" in done.stderr) == (1, True), done.stderr


def test_no_nodes_are_waited_for_that_will_not_come(lab: Any) -> None:
    code, found = checked(lab, "--only", "nodes", "--nodes", "5", "--wait", "600")
    assert code == 0
    assert [(finding["grade"], finding["what"]) for finding in found["nodes"]] == [
        ("SKIP", "the scheduler gives no such nodes")
    ]


def test_nodes_that_are_away_are_no_refusal(lab: Any, slurm: SlurmCluster) -> None:
    slurm.run("scontrol", "update", "NodeName=node04", "State=DRAIN", "Reason=broken fan")
    code, found = checked(lab, "--only", "scheduler", "--nodes", "4")
    (scheduler,) = found["scheduler"]
    told = "too few of its nodes are up now: node04 is drained (broken fan)"
    assert (code, scheduler["grade"], scheduler["what"]) == (0, "WARN", told)


def test_a_busy_cluster_gives_no_nodes_in_time(lab: Any, slurm: SlurmCluster) -> None:
    job = slurm.sbatch("--nodes=4", "--exclusive", "--time=30", "--wrap=sleep 600", folder=lab.folder)
    slurm.wait_for_state(job, "RUNNING")
    code, found = checked(lab, "--only", "scheduler,nodes", "--nodes", "2", "--wait", "5")
    assert (code, found["scheduler"][0]["grade"]) == (0, "PASS")
    assert found["scheduler"][0]["what"].startswith("partition main: the job is expected to start on ")
    (nodes,) = found["nodes"]
    reason = "the nodes that it needs are in use"
    assert nodes["grade"] == "SKIP"
    assert nodes["what"] == f"lab gave no nodes within 5 s: {reason} (--wait SECONDS waits longer)"
    assert slurm.run("squeue", "--noheader", "--format=%i").split() == [str(job)]
    assert not lab.runs()


def test_ctrl_c_cancels_the_job_that_looks(lab: Any, slurm: SlurmCluster) -> None:
    job = slurm.sbatch("--nodes=4", "--exclusive", "--time=30", "--wrap=sleep 600", folder=lab.folder)
    slurm.wait_for_state(job, "RUNNING")
    lab.script("print('never run')\n")
    process = lab.popen("check", "train.py", "--on", "lab", "--nodes", "2")
    slurm.wait_until("the job", lambda: len(slurm.run("squeue", "--noheader").splitlines()) == 2 or None)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert "allranks: check: SIGINT: the job that looks is being cancelled\n" in err.decode()
    assert slurm.run("squeue", "--noheader", "--format=%i").split() == [str(job)]
    assert not list((lab.folder / "runs").glob(".look-*"))


def test_inside_an_allocation_its_nodes_are_looked_at(lab: Any, slurm: SlurmCluster) -> None:
    lab.script("print('never run')\n")
    command = [sys.executable, "-m", "allranks", "check", "train.py", "--json"]
    found = json.loads(slurm.run("salloc", "--nodes=2", *command, folder=lab.folder))["checks"]
    assert [(each["grade"], each["host"]) for each in found if each["check"] == "nodes"] == [
        ("PASS", "node01"),
        ("PASS", "node02"),
    ]


def test_a_node_that_does_not_see_the_folder_of_runs_is_named(lab: Any, slurm: SlurmCluster) -> None:
    runs = lab.folder / "runs"
    runs.mkdir()
    slurm.run_on("node03", ["mount", "-t", "tmpfs", "none", str(runs)])
    try:
        code, found = checked(lab, "--nodes", "4", "--only", "nodes")
    finally:
        slurm.run_on("node03", ["umount", str(runs)])
    print(found)
    assert (code, [(each["host"], each["grade"]) for each in found["nodes"]]) == (
        3,
        [("node01", "PASS"), ("node02", "PASS"), ("node03", "FAIL"), ("node04", "PASS")],
    )
