"""Jobs that are started inside an allocation of PBS: its nodes are those of the file that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_pbs_plan import directives, plan_of

from allranks.errors import PreflightError


@pytest.fixture
def inside(tmp_path: Path) -> dict[str, str]:
    """Give the environment of an allocation of two nodes, of which one stands in the file several times."""
    (tmp_path / "hosts").write_text("gpu2\ngpu1\ngpu2\ngpu2\n")
    return {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(tmp_path / "hosts"), "CUDA_VISIBLE_DEVICES": "0,1,2"}


def test_its_nodes_and_the_gpus_of_the_first_are_used(tmp_path: Path, inside: dict[str, str]) -> None:
    plan = plan_of(tmp_path, inside, scheduler={"partition": "p"}, resources={"time": "1h"}, retry={"requeue": True})
    assert (plan.cluster, plan.kind, plan.nnodes, plan.nproc_per_node) == ("allocation 7.server", "pbs", 2, 3)
    assert (plan.backend, plan.min_nodes) == ("nccl", 2)
    assert plan.commands[0].command == ("bash", f"{tmp_path}/runs/x/script.sh")
    assert (plan.files[0].path, plan.files[0].mode, directives(plan)) == ("script.sh", 0o700, [])
    assert plan.notes == (
        "inside an allocation, which has settled it: scheduler.partition, resources.time not used",
        "retry.requeue: nothing is requeued inside an allocation",
    )
    (ranks,) = [reason.why for reason in plan.reasons if reason.subject == "ranks"]
    assert ranks.startswith("one for each GPU: on this first node of the allocation, ")


def test_no_key_of_the_job_needs_to_be_possible_in_the_queue(tmp_path: Path, inside: dict[str, str]) -> None:
    assert plan_of(tmp_path, inside, scheduler={"exclude": "gpu9", "qos": "high"}).nnodes == 2


@pytest.mark.parametrize(("asked", "expected"), [(0, (1, "gloo")), (2, (2, "nccl"))])
def test_less_gpus_can_be_used(tmp_path: Path, inside: dict[str, str], asked: int, expected: tuple[int, str]) -> None:
    plan = plan_of(tmp_path, inside, resources={"gpus_per_node": asked})
    assert (plan.nproc_per_node, plan.backend) == expected


@pytest.mark.parametrize(("asked", "said"), [("1", "1 node was"), ("3", "3 nodes were"), ("2:4", "4 nodes were")])
def test_another_number_of_nodes_is_refused(tmp_path: Path, inside: dict[str, str], asked: str, said: str) -> None:
    assert plan_of(tmp_path, inside, resources={"nodes": "2"}).nnodes == 2
    with pytest.raises(PreflightError) as caught:
        plan_of(tmp_path, inside, resources={"nodes": asked})
    count = said.split()[0]
    assert str(caught.value) == (
        f"{said.split(' w')[0]} were requested, and this allocation has 2\n"
        "  why: PBS_JOBID is 7.server: the command was typed inside an allocation\n"
        f"  fix: --nodes 2, or qsub -I -l select={count}:... -l place=scatter, or "
        "env -u PBS_JOBID allranks ... for a job of its own"
    )


@pytest.mark.parametrize(
    ("named", "said"), [(None, "not set"), ("/nowhere/hosts", "/nowhere/hosts: No such file or directory")]
)
def test_on_another_node_the_nodes_are_not_known(
    tmp_path: Path, inside: dict[str, str], named: str | None, said: str
) -> None:
    environ = {name: value for name, value in inside.items() if name != "PBS_NODEFILE"}
    if named:
        environ["PBS_NODEFILE"] = named
    with pytest.raises(PreflightError) as caught:
        plan_of(tmp_path, environ)
    assert str(caught.value).startswith(
        f"the nodes of this allocation cannot be found out\n  why: PBS_NODEFILE is {said}; "
    )


def test_a_rank_of_ours_submits_a_job_of_its_own(tmp_path: Path, inside: dict[str, str]) -> None:
    plan = plan_of(tmp_path, {**inside, "PATH": "", "ALLRANKS_RUN_DIR": "/runs/y"})
    assert (plan.commands[0].command[0], plan.nnodes, plan.cluster) == ("qsub", 1, "hall")
