"""A job of Slurm as its supervisor sees it: the step that it starts, and what it asks Slurm for."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks import contract
from allranks.agent.requeue import Decision, start_next
from allranks.agent.slurm_job import Job
from allranks.errors import LaunchError
from node_orders import NODE
from node_orders import ORDERS as OF_PBS

ORDERS = OF_PBS._replace(module="allranks.agent.slurm_job")
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", contract.NODE_COUNT: "2", "PATH": "/nowhere"}
TWO = ["srun", "--nodes=2"]
AGENTS = ["--ntasks=2", "--ntasks-per-node=1"]
LAST = ["--wait=0", "--export=ALL"]


@pytest.mark.parametrize(
    ("orders", "node", "environ", "expected"),
    [
        ({}, {}, {}, [*TWO, *AGENTS, "--kill-on-bad-exit=1", *LAST]),
        (
            {"options": ("--mpi=none", "--comment=a b")},
            {},
            {"SLURM_CPUS_PER_TASK": "8"},
            [*TWO, *AGENTS, "--cpus-per-task=8", "--kill-on-bad-exit=1", *LAST, "--mpi=none", "--comment=a b"],
        ),
        ({}, {"nnodes": 4, "min_nodes": 2}, {}, [*TWO, *AGENTS, "--no-kill", "--kill-on-bad-exit=0", *LAST]),
        (
            {"is_inside": True},
            {},
            {"SLURM_CPUS_PER_TASK": "8"},
            [*TWO, *AGENTS, "--overlap", "--kill-on-bad-exit=1", *LAST],
        ),
        (
            {"is_direct": True},
            {"nproc_per_node": 4},
            {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"},
            [*TWO, "--ntasks=8", "--ntasks-per-node=4", "--distribution=block", "--kill-on-bad-exit=1", *LAST],
        ),
        (
            {"is_direct": True},
            {"nproc_per_node": 4},
            {"SLURM_NTASKS": "6"},
            [*TWO, "--ntasks=6", "--distribution=block", "--kill-on-bad-exit=1", *LAST],
        ),
    ],
    ids=["agents", "options", "elastic", "inside", "direct", "direct with a number of tasks of the user's own"],
)
def test_one_step_starts_all_tasks(
    orders: dict[str, Any], node: dict[str, Any], environ: dict[str, str], expected: list[str]
) -> None:
    job = Job(ORDERS._replace(**orders), NODE._replace(**node), {**JOB, **environ})
    assert job.step_command() == expected


def site(folder: Path, **answers: str) -> dict[str, str]:
    """Make commands of Slurm that answer so; return an environment with them."""
    for command, answer in answers.items():
        (folder / command).write_text(f"#!/bin/sh\n{answer}\n")
        (folder / command).chmod(0o755)
    return {**JOB, "PATH": f"{folder}:{os.defpath}", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}


def test_the_first_node_is_enough_where_there_is_no_scontrol(tmp_path: Path) -> None:
    environ = site(tmp_path, scontrol='[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"')
    assert Job(ORDERS, NODE, environ).hosts() == ["n1", "n2"]
    assert Job(ORDERS, NODE, {**environ, "PATH": "/nowhere"}).hosts() == ["n1"]


def test_outside_of_a_job_the_supervisor_says_so() -> None:
    with pytest.raises(LaunchError, match="SLURM_JOB_ID is not set: sbatch this script"):
        Job(ORDERS, NODE, {})


def test_when_the_job_ends() -> None:
    environ = {**JOB, "SLURM_JOB_END_TIME": "1700000000"}
    assert Job(ORDERS._replace(time=60), NODE, environ).end_time() == 1700000000
    assert Job(ORDERS, NODE, JOB).end_time() is None
    end = Job(ORDERS._replace(time=10**6), NODE, JOB).end_time()  # Slurm before 22.05 has no such variable.
    assert end is not None
    assert 0 <= time.time() + 10**6 - end < 600


REASON = Decision(True, "node n2 was lost", lost=True)
#: scontrol and sbatch as a job sees them: each call is in ``calls``.
SCONTROL = """\
echo "scontrol $*" >> {folder}/calls
case $1 in
  requeue) touch {folder}/requeued; {requeue} ;;
  *) if [ -e {folder}/requeued ]; then echo "JobState={after}"; else echo JobState=RUNNING; fi ;;
esac
"""


@pytest.mark.parametrize(
    ("requeue", "after", "expected", "is_submitted"),
    [
        ("exit 0", "COMPLETING", replace(REASON, how="requeue", job="7"), False),
        ("kill -TERM $$", "COMPLETING", replace(REASON, how="requeue", job="7"), False),
        (
            "kill -TERM $$",
            "CANCELLED",
            Decision(False, "node n2 was lost, but Slurm is ending the job already: it is CANCELLED", given_up=True),
            False,
        ),
        (
            "echo disabled >&2; exit 1",
            "RUNNING",
            replace(REASON, how="dependent", job="8", why="node n2 was lost; scontrol: disabled"),
            True,
        ),
    ],
    ids=["requeued", "requeued, and scontrol ended by it", "cancelled meanwhile", "refused"],
)
def test_a_run_goes_on_in_one_job(
    tmp_path: Path, requeue: str, after: str, expected: Decision, *, is_submitted: bool
) -> None:
    """Slurm ends the processes of a job that it requeues: that is no refusal, after which another job is submitted."""
    attempt = tmp_path / contract.attempt_dir(0)
    attempt.mkdir(parents=True)
    scontrol = SCONTROL.format(folder=tmp_path, requeue=requeue, after=after)
    environ = site(tmp_path, scontrol=scontrol, sbatch=f'echo "sbatch" >> {tmp_path}/calls; echo 8')
    assert start_next(tmp_path, 0, REASON, Job(ORDERS, NODE, environ)) == expected
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ("scontrol requeue 7" in calls, "sbatch" in calls) == (True, is_submitted)


def test_a_tasks_place_is_what_slurm_says() -> None:
    names = {"PROCID": "5", "LOCALID": "1", "NODEID": "2", "STEP_NUM_TASKS": "6", "GTIDS": "4,5"}
    place = Job(ORDERS, NODE, {**JOB, **{f"SLURM_{name}": value for name, value in names.items()}}).place()
    assert (place.rank, place.local_rank, place.node, place.world_size, place.ranks) == (5, 1, 2, 6, [4, 5])
