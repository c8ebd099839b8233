"""What a check finds on PBS, real or not: what it would refuse, and what is wrong on its nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pbs_cluster import PbsCluster

from waiting import PATIENCE


def checked(lab: Any, *flags: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Check with --json; return the exit code, and the findings of each check."""
    lab.script("print('never run')\n")
    done = lab("check", "train.py", "--on", "lab", "--json", *flags, timeout=2 * PATIENCE)
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(done.stdout)["checks"]:
        found.setdefault(finding["check"], []).append(finding)
    return done.rc, found


def test_a_healthy_cluster(pbs_lab: Any, pbs: PbsCluster) -> None:
    """It takes more than 10 s on a slow machine: a job inspects four nodes."""
    code, found = checked(pbs_lab, "--nodes", "4")
    bad = [finding for each in found.values() for finding in each if finding["grade"] in ("WARN", "FAIL")]
    assert (code, bad) == (0, [])
    assert [finding["host"] for finding in found["nodes"]] == pbs.nodes[:4]
    (scheduler,) = found["scheduler"]
    assert (scheduler["grade"], scheduler["what"]) == ("PASS", "queue workq: it takes the job")
    assert not pbs_lab.runs()


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--partition", "nothere"), "PBS has no queue nothere"),
        (
            ("--partition", "gpuq", "--time", "3:00:00"),
            "03:00:00 are requested, and queue gpuq gives a job at most 02:00:00",
        ),
        (
            ("--gpus-per-node", "5"),
            "5 GPUs of each node are requested, and no node of this PBS has more than 4 GPUs",
        ),
    ],
)
def test_what_could_never_start(pbs_lab: Any, flags: tuple[str, ...], what: str) -> None:
    code, found = checked(pbs_lab, "--only", "scheduler", *flags)
    (scheduler,) = found["scheduler"]
    assert (code, scheduler["grade"], scheduler["what"]) == (3, "FAIL", what)


@pytest.mark.usefixtures("checked")
def test_a_job_that_could_never_start_is_not_submitted(pbs_lab: Any, pbs: PbsCluster) -> None:
    pbs_lab.script("print('never run')\n")
    asked = ("run", "train.py", "--on", "lab", "--nodes", str(len(pbs.nodes) + 1))
    done = pbs_lab(*asked)
    assert done.rc == 3
    assert done.stderr.splitlines()[-4:-1] == [
        f"error: scheduler: {len(pbs.nodes) + 1} nodes are requested, and this PBS has {len(pbs.nodes)}",
        "  why: a scheduler rejects a job that requests more than it has, or keeps it pending forever",
        f"  fix: lower resources.nodes to {len(pbs.nodes)}, or choose another scheduler.partition; "
        "--no-check submits it all the same",
    ]
    status = pbs_lab.record()["status"]
    assert (status["state"], status["native"], status["exit_code"]) == ("FAILED", "not started", 3)
    submitted = pbs_lab(*asked, "--no-check", "--detach")
    assert submitted.rc == 0, submitted.stderr
    assert pbs_lab("cancel").rc == 0


def test_ranks_are_tried(pbs_lab: Any) -> None:
    """It takes more than 10 s: ranks import torch on two nodes, measure, and train."""
    names = ("nodes", "all-reduce", "training", "culprit")
    code, found = checked(pbs_lab, "--full", "--only", ",".join(names), "--nodes", "2", "--nproc-per-node", "1")
    *grades, culprit = (found[name][0]["grade"] for name in names)
    assert (code, grades) == (0, ["PASS", "PASS", "PASS"]), found
    assert culprit in ("SKIP", "PASS"), found  # A link that was slow for a moment, beside other tests, is tried again.
    assert not pbs_lab.runs()


def test_a_node_that_cannot_be_set_up_is_named(pbs_lab: Any, pbs: PbsCluster) -> None:
    name = pbs.nodes[1]
    line = f'node_setup: [\'[ "$HOSTNAME" != {name} ] || {{ echo "no scratch here" >&2; exit 9; }}\']'
    (pbs_lab.folder / "job.yaml").write_text(f"script: train.py\nenvironment: {{{line}}}\n")
    pbs_lab.script("print('never run')\n")
    done = pbs_lab("check", "job.yaml", "--on", "lab", "--nodes", "2", "--only", "nodes", timeout=PATIENCE)
    assert done.rc == 3
    assert f"FAIL  nodes  {name}: no scratch here\n" in done.stdout
    assert f"PASS  nodes  {pbs.nodes[0]}: Python " in done.stdout


def test_a_busy_cluster_gives_no_nodes_in_time(pbs_lab: Any, pbs: PbsCluster) -> None:
    sleep = pbs_lab.script("sleep 600\n", "sleep.sh")
    nodes = ("-l", "select=4:ncpus=8", "-l", "place=scatter:excl")
    job = pbs.run("qsub", *nodes, str(sleep), folder=pbs_lab.folder).strip()
    code, found = checked(pbs_lab, "--only", "nodes", "--nodes", "2", "--wait", "1")
    (finding,) = found["nodes"]
    assert (code, finding["grade"]) == (0, "SKIP")
    assert finding["what"].startswith("lab gave no nodes within 1 s: ")
    assert f"{job.partition('.')[0]}." in pbs.run("qstat")
    assert len(pbs.run("qstat").splitlines()) == 3
