"""What PBS would do with a job that is not submitted: from its queues and nodes, as a real one has shown them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pbs_recorded import ANSWERS

from allranks.clusters.base import Feasibility, Issue, Request
from allranks.clusters.batch.limits import NodeInfo, Requested, missing
from allranks.clusters.pbs import (
    PbsCluster,
    feasibility,
    lacking,
    limits,
    parse,
    parse_nodes,
    read_requested,
)
from allranks.job.spec import Job

GB = 1 << 30
QUEUES = parse((ANSWERS / "queues.txt").read_text())
NODES = parse_nodes((ANSWERS / "nodes.txt").read_text())
TORQUE_NODES = """\
pbs01
     state = free
     power_state = Running
     np = 8
     ntype = cluster
     gpus = 4

pbs02
     state = down,offline
     np = 8
     note = no network
"""
OTHER = "choose another scheduler.partition; qstat -Q lists the queues"


def asked(folder: Path, flavour: str, **job: Any) -> tuple[Requested, ...]:
    scheduler = {"flavour": flavour, **job.pop("scheduler", {})}
    made = Job.model_validate({"binary": "true", "cluster": "lab", "scheduler": scheduler, **job})
    return read_requested(PbsCluster().plan(Request(made, folder, folder / "runs" / "x", {"PATH": ""})).files[0].text)


@pytest.mark.parametrize("flavour", ["openpbs", "torque"])
def test_what_a_script_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flavour: str) -> None:
    resources = {"nodes": 3, "gpus_per_node": 4, "cpus_per_node": 8, "time": "2:30:00"}
    found = asked(tmp_path, flavour, resources=resources, scheduler={"partition": "gpuq", "include": "pbs02"})
    assert found == (Requested(("gpuq",), 3, 9000, "", 8, 0, 4),)


def test_the_users_own_nodes_come_first() -> None:
    script = "#PBS -l select=2:ncpus=4:mem=8gb+1:ncpus=2\n#PBS -l select=9:ncpus=1\n#PBS -l walltime=90\n#PBS -q a@b\n"
    assert read_requested(script) == (
        Requested(("a@b",), 2, 90, "", 4, 8 * GB, 0),
        Requested(("a@b",), 1, 90, "", 2, 0, 0),
    )
    assert read_requested("") == (Requested(),)


def test_nodes_of_two_kinds_are_looked_for_each() -> None:
    """Those of one kind need not be as large as those of the other."""
    script = "#PBS -l select=1:ncpus=2+4:ncpus=64:ngpus=8\n"
    parts = read_requested(script)
    small, big = [NodeInfo("small", "free", False, 4, GB, 0)], NodeInfo("big", "free", False, 64, GB, 8)
    assert lacking(script, small + [big] * 4) == []
    (found,) = lacking(script, small + [big] * 3)
    assert (found.what, found.is_final) == ("4 nodes are requested, and this PBS has 3 such", True)
    assert [*limits(parts, "q", {"resources_max.ncpus": "258", "resources_max.ngpus": "32"})] == []
    assert len([*limits(parts, "q", {"resources_max.ncpus": "257", "resources_max.nodect": "4"})]) == 2


def test_chunks_that_may_lie_on_one_node_need_no_more() -> None:
    script = "#PBS -l select=8:ncpus=8:ngpus=1\n#PBS -l place={}\n"
    (scattered,) = lacking(script.format("scatter:excl"), NODES)
    assert (scattered.what, scattered.fix) == (
        "8 nodes are requested, and this PBS has 4",
        "lower resources.nodes to 4, or choose another scheduler.partition",
    )
    (away,) = lacking(script.format("free"), NODES)
    assert not away.is_final


def test_queues() -> None:
    assert [*QUEUES] == ["workq", "gpuq", "closedq"]
    assert QUEUES["gpuq"]["resources_max.walltime"] == "02:00:00"
    assert QUEUES["workq"]["state_count"].endswith("Begun:0")  # A line that PBS has wrapped.


def test_what_a_queue_does_not_give() -> None:
    too_much = [Requested(nodes=3, time=3 * 3600, cpus=1)]
    assert [*limits(too_much, "gpuq", QUEUES["gpuq"])] == [
        Issue("queue gpuq starts no jobs now", f"wait, or {OTHER}", is_final=False),
        Issue(
            "03:00:00 are requested, and queue gpuq gives a job at most 02:00:00", f"lower resources.time, or {OTHER}"
        ),
        Issue(
            "3 nodes are requested, and queue gpuq gives a job at most 2 nodes", f"lower resources.nodes, or {OTHER}"
        ),
    ]
    *_, too_little = limits([Requested(cpus=1)], "gpuq", QUEUES["gpuq"])
    assert too_little.what == "1 CPU are requested, and queue gpuq gives a job at least 2 CPUs"
    assert [*limits(too_much, "workq", QUEUES["workq"])] == []
    (closed,) = limits([Requested()], "old", {"enabled": "False", "started": "True"})
    assert (closed.what, closed.is_final) == ("queue old takes no jobs", True)


def test_a_job_is_compared_with_its_queue_or_the_default_one_and_with_the_nodes(tmp_path: Path) -> None:
    answers = {"qstat": f'cat "{ANSWERS}/$([ "$1" = -B ] && echo server || echo queues).txt"'}
    for name, line in {**answers, "pbsnodes": f'cat "{ANSWERS}/nodes.txt"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)

    def found(ranks: int = 1, **scheduler: str) -> Feasibility:
        job = {"binary": "true", "cluster": "lab", "scheduler": {"flavour": "openpbs", **scheduler}}
        made = Job.model_validate({**job, "resources": {"nodes": 5}, "launch": {"nproc_per_node": ranks}})
        plan = PbsCluster().plan(Request(made, tmp_path, tmp_path / "runs" / "x", {"PATH": ""}))
        return feasibility(plan, {"PATH": f"{tmp_path}:{os.environ['PATH']}"})

    assert (found().where, [issue.what for issue in found().objections]) == (
        "queue workq",
        ["5 nodes are requested, and this PBS has 4"],
    )
    assert found(partition="none").objections == [Issue("PBS has no queue none", OTHER)]
    assert found(ranks=128).objections == found().objections
    assert found(ranks=129).objections == [
        *found().objections,
        Issue(
            "129 ranks on each node are requested, and no node of this PBS has more than 8 CPUs: "
            "more than 16 ranks on each CPU make no progress",
            "--nproc-per-node 8",
        ),
    ]


def test_nodes() -> None:
    assert NODES[0] == NodeInfo("pbs01", "free", False, 8, 8 * GB, 4)
    assert NODES[3] == NodeInfo("pbs04", "offline", True, 8, 8 * GB, 4, "broken fan")
    assert parse_nodes(TORQUE_NODES) == (
        NodeInfo("pbs01", "free", False, 8, 0, 4),
        NodeInfo("pbs02", "down,offline", True, 8, 0, 0, "no network"),
    )


def test_virtual_nodes_of_a_host_are_one() -> None:
    half = "{}\n     state = {}\n     resources_available.host = big\n     resources_available.ncpus = 32\n\n"
    assert parse_nodes(half.format("big[0]", "free") + half.format("big[1]", "offline")) == (
        NodeInfo("big", "offline", False, 64, 0, 0),
    )


@pytest.mark.parametrize(
    ("wanted", "what", "is_final"),
    [
        (Requested(nodes=5), "5 nodes are requested, and this PBS has 4", True),
        (Requested(cpus=99), "99 CPUs of each node are requested, and no node of this PBS has more than 8 CPUs", True),
        (Requested(nodes=4), "too few of its nodes are up now: pbs04 is offline (broken fan)", False),
    ],
)
def test_why_nodes_are_not_available(wanted: Requested, what: str, is_final: bool) -> None:
    (found,) = missing(wanted, "this PBS", NODES, "pbsnodes -l")
    assert (found.what, found.is_final) == (what, is_final)
