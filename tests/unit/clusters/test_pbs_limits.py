"""What PBS would do with a job that is not submitted: from its queues and nodes, as a real one has shown them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pbs_recorded import ANSWERS

from allranks.clusters.base import Request
from allranks.clusters.limits import Asked, NodeInfo, missing
from allranks.clusters.outlook import Objection
from allranks.clusters.pbs_limits import default_queue, limits, parse, parse_nodes, read_asked
from allranks.clusters.pbs_plan import make_plan
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


def asked(folder: Path, flavour: str, **job: Any) -> Asked:
    scheduler = {"flavour": flavour, **job.pop("scheduler", {})}
    made = Job.model_validate({"binary": "true", "cluster": "lab", "scheduler": scheduler, **job})
    return read_asked(make_plan(Request(made, folder, folder / "runs" / "x", {"PATH": ""})).files[0].text)


@pytest.mark.parametrize("flavour", ["openpbs", "torque"])
def test_what_a_script_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flavour: str) -> None:
    resources = {"nodes": 3, "gpus_per_node": 4, "cpus_per_node": 8, "time": "2:30:00"}
    found = asked(tmp_path, flavour, resources=resources, scheduler={"partition": "gpuq", "include": "pbs02"})
    assert found == Asked(("gpuq",), 3, 9000, "", 8, 0, 4)


def test_the_users_own_nodes_come_first() -> None:
    script = "#PBS -l select=2:ncpus=4:mem=8gb+1:ncpus=2\n#PBS -l select=9:ncpus=1\n#PBS -l walltime=90\n#PBS -q a@b\n"
    assert read_asked(script) == Asked(("a@b",), 3, 90, "", 4, 8 * GB, 0)


def test_queues_and_the_default_one() -> None:
    assert [*QUEUES] == ["workq", "gpuq", "closedq"]
    assert QUEUES["gpuq"]["resources_max.walltime"] == "02:00:00"
    assert QUEUES["workq"]["state_count"].endswith("Begun:0")  # A line that PBS has wrapped.
    assert default_queue((ANSWERS / "server.txt").read_text()) == "workq"


def test_what_a_queue_does_not_give() -> None:
    too_much = Asked(nodes=3, time=3 * 3600, cpus=1)
    assert [*limits(too_much, "gpuq", QUEUES["gpuq"])] == [
        Objection("queue gpuq starts no jobs now", f"wait, or {OTHER}", is_final=False),
        Objection(
            "03:00:00 are asked for, and queue gpuq gives a job at most 02:00:00", f"lower resources.time, or {OTHER}"
        ),
        Objection(
            "3 nodes are asked for, and queue gpuq gives a job at most 2 nodes", f"lower resources.nodes, or {OTHER}"
        ),
    ]
    *_, too_little = limits(Asked(cpus=1), "gpuq", QUEUES["gpuq"])
    assert too_little.what == "1 CPU are asked for, and queue gpuq gives a job at least 2 CPUs"
    assert [*limits(too_much, "workq", QUEUES["workq"])] == []
    (closed,) = limits(Asked(), "old", {"enabled": "False", "started": "True"})
    assert (closed.what, closed.is_final) == ("queue old takes no jobs", True)


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
        (Asked(nodes=5), "5 nodes are asked for, and this PBS has 4 such", True),
        (Asked(cpus=99), "99 CPUs of each node are asked for, and no node of this PBS has more than 8 CPUs", True),
        (Asked(nodes=4), "too few of its nodes are up now: pbs04 is offline (broken fan)", False),
    ],
)
def test_why_nodes_are_not_available(wanted: Asked, what: str, is_final: bool) -> None:
    (found,) = missing(wanted, "this PBS", NODES, "pbsnodes -l")
    assert (found.what, found.is_final) == (what, is_final)
