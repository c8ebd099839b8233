"""Machines that wait for one to be lost, in the plan of each kind of cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from allranks.clusters.registry import load_kind
from allranks.job.load import load_job
from allranks.launch.submit import Launch, dry_run
from allranks.plan.plan import Plan


def plan_of(folder: Path, resources: str, cluster: str) -> Plan:
    (folder / "train.py").write_text("")
    (folder / "hosts").write_text("gpu1 slots=2\ngpu2 slots=2\ngpu3 slots=4\n")
    (folder / "clusters.yaml").write_text("lab: {kind: slurm}\nracks: {kind: ssh}\n")
    launch = "launch: {backend: gloo, master_addr: gpu1}"
    (folder / "job.yaml").write_text(f"script: train.py\ncluster: {cluster}\nresources: {resources}\n{launch}\n")
    loaded = load_job(folder / "job.yaml", flags={}, environ={}, cwd=folder)
    asked = Launch(loaded.job, "", folder, folder / "runs", {"PATH": os.environ["PATH"]})
    return dry_run(asked, load_kind(loaded.cluster.kind))


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ("{hostfile: hosts}", (3, 0, 0, 8)),
        ("{hostfile: hosts, spares: 1}", (2, 0, 1, 4)),
        ("{hostfile: hosts, nodes: '1:2', spares: 1}", (2, 1, 1, 4)),
        ("{hostfile: hosts, nodes: '2:3'}", (3, 2, 0, 8)),
    ],
)
def test_spares_count_neither_as_nodes_nor_as_ranks(
    tmp_path: Path, resources: str, expected: tuple[int, int, int, int]
) -> None:
    plan = plan_of(tmp_path, resources, "racks")
    nodes, least, spares, _ = expected
    assert (plan.nnodes, plan.min_nodes, plan.spares, plan.world_size) == expected
    assert [command.host for command in plan.commands] == ["gpu1", "gpu2", "gpu3"]
    (orders,) = (json.loads(file.text) for file in plan.files if file.path == "node.json")
    assert (orders["nnodes"], orders["min_nodes"], orders["spares"]) == (nodes + spares, least or nodes, spares)
    assert [reason.value for reason in plan.reasons if reason.subject == "spares"] == ["gpu3"] * spares


@pytest.mark.parametrize("cluster", ["local", "lab"])
def test_elsewhere_it_is_said_that_there_are_none(tmp_path: Path, cluster: str) -> None:
    told = [note for note in plan_of(tmp_path, "{spares: 1}", cluster).notes if note.startswith("resources.spares")]
    assert [note.partition(";")[0] for note in told] == ["resources.spares: nodes are kept ready over SSH only"]
