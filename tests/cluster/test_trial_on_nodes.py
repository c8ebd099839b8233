"""``allranks test`` and ``allranks check --full`` on nodes: what is slow or wrong is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from cluster_tools import missing_commands
from links import shaped
from needed import need
from nodes import Network
from ssh_runs import left_on

from trial_faults import hurt

ON_FOUR = ("--nodes", "gpu[01-04]", "--nproc-per-node", "1", "--backend", "gloo")
TRIED = ("--full", "--only", "nodes,interface,all-reduce,bandwidth,neighbours,training", "--json")


def parts_of(done: Any) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in json.loads(done.stdout)["parts"]}


def test_four_machines(ssh: Any, network: Network) -> None:
    """It takes more than 10 s: ranks import torch on four nodes, measure, and train."""
    done = ssh("test", *ON_FOUR, "--json")
    assert done.rc == 0, done.stderr
    hosts = [part["hosts"] for part in parts_of(done).values() if part["kind"] == "link"]
    ring = [["gpu01", "gpu02"], ["gpu02", "gpu03"], ["gpu03", "gpu04"], ["gpu04", "gpu01"]]
    assert sorted(hosts) == sorted(ring + [way[::-1] for way in ring])
    assert [who["host"] for who in json.loads(done.stdout)["ranks"]] == ["gpu01", "gpu02", "gpu03", "gpu04"]
    assert left_on(network, ssh.run()) == {}


def test_a_full_check_of_healthy_machines(ssh: Any) -> None:
    """How fast links are is not asserted, as other tests need the CPUs: ``test_tried_checks.py`` gives rates.

    It takes more than 10 s: ranks import torch on each node, measure, and train.
    """
    done = ssh("check", *ON_FOUR, *TRIED)
    assert done.rc == 0, done.stderr
    grades = [(each["check"], each["grade"]) for each in json.loads(done.stdout)["checks"]]
    speeds = {"bandwidth", "neighbours"}
    assert {grade for name, grade in grades if name not in speeds} == {"PASS"}
    assert {name for name, grade in grades if name in speeds and grade in ("PASS", "WARN")} == speeds


def test_a_machine_that_computes_wrongly(ssh: Any) -> None:
    """It takes more than 10 s: ranks import torch on each node, measure, and train."""
    done = ssh("test", *ON_FOUR, "--json", *hurt(ssh.folder / "site", "broadcast: is wrong", "gpu03"))
    assert done.rc == 3
    wrong = {name: part["wrong"] for name, part in parts_of(done).items() if part["wrong"]}
    assert wrong == {
        "broadcast from rank 0": "on rank 2 on gpu03: number 3 must be 4, and is 5",
        "broadcast from rank 3": "on rank 2 on gpu03: number 3 must be 7, and is 8",
    }


def test_a_slow_link(ssh: Any, mended: Network, undo: Callable[..., object]) -> None:
    """It takes more than 10 s: ranks import torch on each node, measure, and train.

    All nodes send as fast as is set here, and none says how fast it could: else the load of this machine would decide
    which links are slow.
    """
    need("traffic control", missing_commands({"tc": "iproute2"}))
    speed = "/sys/class/net/eth0/speed"
    for node in mended.nodes.values():
        node.run(["mount", "--bind", "/dev/null", speed])
        undo(node, ["umount", speed])
    with shaped(mended, "gpu03"):
        done = ssh("check", *ON_FOUR, *TRIED)
    assert done.rc == 0, done.stderr
    (found,) = [each for each in json.loads(done.stdout)["checks"] if each["check"] == "neighbours"]
    assert (found["grade"], found["exclude"]) == ("WARN", "gpu03")
    assert re.match("rank 2 on gpu03 to rank [13] on gpu0[24] and in 1 other way at ", found["what"])
    assert found["fix"].startswith("check the network of gpu03: ")


@pytest.mark.parametrize("cluster", ["lab", "pbs_lab"])
def test_on_a_scheduler(request: pytest.FixtureRequest, cluster: str) -> None:
    """It takes more than 10 s: ranks import torch on each node of a job, measure, and train."""
    lab = request.getfixturevalue(cluster)
    done = lab("test", "--on", "lab", "--nodes", "2", "--nproc-per-node", "1", "--backend", "gloo", "--json")
    assert done.rc == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["good"]
    assert [(who["rank"], who["node_rank"], who["local_rank"]) for who in told["ranks"]] == [(0, 0, 0), (1, 1, 0)]
    assert len({who["host"] for who in told["ranks"]}) == 2
