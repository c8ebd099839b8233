"""The GPUs of an allocation: told by its variables, else by Slurm; here a script stands in for scontrol."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_slurm_plan import plan_of

from allranks.clusters.slurm import SlurmCluster, count_gpus
from allranks.errors import LaunchError
from allranks.plan.plan import Plan

INSIDE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
#: As a real Slurm 22.05 writes it, shortened.
SHOWN = """\
JobId=7 JobName=bash
   JobState=RUNNING Reason=None Dependency=(null)
   NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   JOB_GRES=gpu:4
{nodes}
   Command=bash
   TresPerJob=gres:gpu:4
"""
EVEN = "     Nodes=node[01-02] CPU_IDs=0 Mem=4000 GRES=gpu:2(IDX:0-1)"
UNEVEN = (
    "     Nodes=node01 CPU_IDs=0 Mem=4000 GRES=gpu:3(IDX:0-2)\n     Nodes=node02 CPU_IDs=0 Mem=4000 GRES=gpu:1(IDX:0)"
)
NONE = "     Nodes=node[01-02] CPU_IDs=0 Mem=4000 GRES="
UNTOLD = "     Nodes=node[01-02] CPU_IDs=0 Mem=4000"


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("gpu:2(IDX:0-1)", 2),
        ("gpu:a100:4(IDX:0,2,4-5)", 4),
        ("gpu:1g.5gb:2(IDX:0-1),gpu:v100:1(IDX:3)", 3),
        ("shard:8(0/8),gpu:2(IDX:0-1)", 2),
        ("nic:2(IDX:0-1)", 0),
        ("", 0),
    ],
)
def test_what_slurm_writes(gres: str, count: int) -> None:
    assert count_gpus(gres) == count


def _slurm(folder: Path, nodes: str, code: int = 0) -> dict[str, str]:
    """Make a scontrol that answers so; return an environment inside the allocation, with it."""
    (folder / "bin").mkdir()
    (folder / "answer").write_text(SHOWN.format(nodes=nodes))
    script = folder / "bin" / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >"{folder}/asked"\ncat "{folder}/answer"\nexit {code}\n')
    script.chmod(0o755)
    return {**INSIDE, "PATH": f"{folder}/bin:{os.defpath}"}


def step_options(plan: Plan) -> list[str]:
    """Return the options of the step that the supervisor is told."""
    options: list[str] = json.loads(plan.files[3].text)["options"]
    return options


@pytest.mark.parametrize(
    ("nodes", "ranks", "backend", "why"),
    [
        (EVEN, 2, "nccl", "one for each GPU: this allocation has 2 on each node"),
        (NONE, 1, "gloo", "one: this allocation has none"),
    ],
)
def test_slurm_is_asked_where_no_variable_tells(tmp_path: Path, nodes: str, ranks: int, backend: str, why: str) -> None:
    plan = plan_of(tmp_path, _slurm(tmp_path, nodes), cluster="local")
    assert (plan.nnodes, plan.nproc_per_node, plan.backend, plan.cluster) == (2, ranks, backend, "allocation 7")
    assert (plan.reasons[2].subject, plan.reasons[2].why) == ("ranks", why)
    assert plan.notes == ()
    assert (tmp_path / "asked").read_text() == "--details show job 7\n"
    assert step_options(plan) == []


def test_with_different_numbers_the_least_is_used_everywhere(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {**_slurm(tmp_path, UNEVEN), "SLURM_GPUS": "4", "SLURM_GPUS_ON_NODE": "3"})
    assert (plan.world_size, plan.backend) == (2, "nccl")
    assert plan.notes == (
        "the nodes of this allocation have 1 to 3 GPUs, of which 1 on each are used: "
        "salloc --gpus-per-node gives all nodes the same number",
    )
    assert step_options(plan) == ["--gpus-per-node=1"]


def test_a_step_asks_for_what_an_allocation_by_task_has(tmp_path: Path) -> None:
    environ = {**_slurm(tmp_path, EVEN), "SLURM_GPUS_PER_TASK": "1"}
    plan = plan_of(tmp_path, environ, launch={"launcher_args": ["--mpi=none"]})
    assert plan.world_size == 4
    assert step_options(plan) == ["--gpus-per-node=2", "--mpi=none"]
    assert step_options(plan_of(tmp_path, environ, resources={"gpus_per_node": 1})) == ["--gpus-per-node=1"]


@pytest.mark.parametrize(
    ("nodes", "code", "problem"),
    [
        (EVEN, 1, "scontrol failed: "),
        (UNTOLD, 0, "Slurm does not report; "),
    ],
)
def test_what_slurm_does_not_tell_is_said(tmp_path: Path, nodes: str, code: int, problem: str) -> None:
    plan = plan_of(tmp_path, _slurm(tmp_path, nodes, code))
    assert (plan.nproc_per_node, plan.backend) == (1, "gloo")
    (note,) = plan.notes
    assert note.startswith(f"the GPUs of this allocation are not known, and not used: {problem}")
    assert note.endswith("; --gpus-per-node N uses them")


@pytest.mark.parametrize(
    "told",
    [
        {"SLURM_GPUS_ON_NODE": "2"},
        {"SLURM_GPUS_PER_NODE": "a100:2", "SLURM_GPUS_ON_NODE": "2", "SLURM_GPUS": "4"},
        {"SLURM_GPUS": "2", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_NUM_NODES": "1"},
    ],
)
def test_slurm_is_not_asked_where_variables_tell(tmp_path: Path, told: dict[str, str]) -> None:
    assert plan_of(tmp_path, {**INSIDE, "PATH": str(tmp_path), **told}).nproc_per_node == 2
    asked = plan_of(tmp_path, {**INSIDE, "PATH": str(tmp_path)}, resources={"gpus_per_node": 3})
    assert (asked.nproc_per_node, asked.notes) == (3, ())


def test_a_run_of_an_allocation_resumes_in_one_of_as_many_nodes(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {**INSIDE, "PATH": str(tmp_path)}, resources={"gpus_per_node": 0})
    with pytest.raises(LaunchError) as caught:
        SlurmCluster().again(plan, 1)
    assert caught.value.fix == "salloc --nodes=2, and allranks resume there; or allranks run --on a cluster"
