"""From a job to what Slurm is asked for, and to what its nodes are told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.clusters.base import Request
from allranks.clusters.slurm import SlurmCluster
from allranks.errors import AllranksError, JobError, PreflightError
from allranks.job.spec import Job
from allranks.plan.plan import Plan


def plan_of(folder: Path, environ: dict[str, str] | None = None, *, standalone: bool = False, **job: Any) -> Plan:
    """Plan a job that is given as the sections of a job file; ``gpus`` is short for resources.gpus_per_node."""
    (folder / "train.py").touch()
    made = Job.model_validate({"script": "train.py", "cluster": "lab", **job})
    return SlurmCluster().plan(Request(made, folder, folder / "runs" / "x", environ or {}, standalone))


def directives(plan: Plan) -> list[str]:
    found = [line for line in plan.files[0].text.splitlines() if line.startswith("#SBATCH ")]
    return [line.removeprefix("#SBATCH ") for line in found]


def orders(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan.files[1].text)
    return found


def lines(plan: Plan, start: str) -> list[str]:
    """Return the lines of node.sh that start so."""
    return [line for line in plan.files[2].text.splitlines() if line.startswith(start)]


DEFAULTS = ["--job-name=train", "--nodes=1", "--ntasks-per-node=1", "--open-mode=append", "--requeue"]


@pytest.mark.parametrize(
    ("job", "asked"),
    [
        ({"resources": {"nodes": "3"}}, "--nodes=3"),
        ({"resources": {"nodes": "2:4"}}, "--nodes=2-4"),
        ({"resources": {"nodes": "2:4"}}, "--no-kill"),
        ({"resources": {"gpus_per_node": 4}}, "--gpus-per-node=4"),
        ({"resources": {"gpus_per_node": 4, "gpu_type": "a100"}}, "--gpus-per-node=a100:4"),
        ({"resources": {"gpus_per_node": 4}, "scheduler": {"gpu_request": "gres"}}, "--gres=gpu:4"),
        (
            {"resources": {"gpus_per_node": 4, "gpu_type": "a100"}, "scheduler": {"gpu_request": "gres"}},
            "--gres=gpu:a100:4",
        ),
        ({"resources": {"cpus_per_node": 32}, "launch": {"nproc_per_node": 4}}, "--cpus-per-task=32"),
        (
            {"resources": {"cpus_per_node": 32}, "launch": {"nproc_per_node": 4, "launcher": "direct"}},
            "--cpus-per-task=8",
        ),
        ({"launch": {"nproc_per_node": 4, "launcher": "direct"}}, "--ntasks-per-node=4"),
        ({"resources": {"memory": "1.5T"}}, "--mem=1536G"),
        ({"resources": {"time": "2-12:00"}}, "--time=60:00:00"),
        ({"scheduler": {"partition": "gpu"}}, "--partition=gpu"),
        ({"scheduler": {"account": "my lab"}}, '--account="my lab"'),
        ({"scheduler": {"qos": "high"}}, "--qos=high"),
        ({"scheduler": {"constraint": "a&b"}}, "--constraint=a&b"),
        ({"scheduler": {"include": "gpu[01,03],gpu07"}}, "--nodelist=gpu[01,03],gpu07"),
        ({"scheduler": {"exclude": ["gpu02", "gpu03"]}}, "--exclude=gpu02,gpu03"),
        ({"scheduler": {"reservation": "r"}}, "--reservation=r"),
        ({"scheduler": {"exclusive": True}}, "--exclusive"),
        ({"scheduler": {"array": "0-9%2"}}, "--array=0-9%2"),
        ({"notify": {"mail": "me@x"}}, "--mail-user=me@x"),
        ({"notify": {"mail": "me@x"}}, "--mail-type=FAIL,REQUEUE,END"),
        ({"notify": {"mail": "me@x", "on": "start, failure"}}, "--mail-type=BEGIN,FAIL"),
        ({"scheduler": {"output": "%j.log"}}, "--output={folder}/%j.log"),
        ({"scheduler": {"error": "/tmp/%j.err"}}, "--error=/tmp/%j.err"),
        ({"scheduler": {"directives": ["#SBATCH --nice=9"]}}, "--nice=9"),
        ({"retry": {"requeue": False}}, "--no-requeue"),
        ({}, "--output={folder}/runs/x/slurm-%j.out"),
        ({}, "--signal=B:USR1@120"),
        ({"retry": {"warn_before": 300}}, "--signal=B:USR1@300"),
        ({"resources": {"time": "3min"}}, "--signal=B:USR1@90"),
    ],
)
def test_each_wish_is_a_directive(tmp_path: Path, job: dict[str, Any], asked: str):
    found = directives(plan_of(tmp_path, **job))
    assert asked.format(folder=tmp_path) in found
    assert len({line.partition("=")[0] for line in found}) == len(found)


def test_nothing_else_is_asked_for(tmp_path: Path):
    found = directives(plan_of(tmp_path, retry={"warn_before": 0}))
    assert sorted(found) == sorted([*DEFAULTS, f"--output={tmp_path}/runs/x/slurm-%j.out"])


def test_a_users_own_directives_come_last_and_theirs_count_for_gpus(tmp_path: Path):
    found = directives(
        plan_of(
            tmp_path,
            resources={"gpus_per_node": 4},
            scheduler={"directives": ["--gres=gpu:a100:4", "--time=5"], "partition": "p"},
        )
    )
    assert found[-2:] == ["--gres=gpu:a100:4", "--time=5"]
    assert "--gpus-per-node=4" not in found


def test_with_a_range_of_nodes_no_number_of_tasks_keeps_slurm_at_the_least(tmp_path: Path):
    plan = plan_of(tmp_path, resources={"nodes": "2:4"})
    assert not [line for line in directives(plan) if line.startswith("--ntasks")]
    assert (plan.nnodes, orders(plan)["nnodes"], orders(plan)["min_nodes"]) == (4, 4, 2)
    assert "--no-kill" in directives(plan)


def nproc(plan: Plan) -> tuple[int, str, str]:
    """Return the ranks of a node, the backend, and the ranks as node.sh counts them or its orders say."""
    (line,) = lines(plan, "export ALLRANKS_NODE_RANK=$SLURM_NODEID")
    counted = line.partition("ALLRANKS_NODE_NPROC=")[2]
    assert counted in ("", "${SLURM_GPUS_ON_NODE:-$ALLRANKS_NODE_NPROC}")
    return plan.nproc_per_node, plan.backend, f"{'a GPU each, or ' * bool(counted)}{orders(plan)['nproc_per_node']}"


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({}, (1, "gloo", "1")),
        ({"resources": {"gpus_per_node": 4}}, (4, "nccl", "a GPU each, or 4")),
        ({"resources": {"gpus_per_node": 4}, "launch": {"backend": "gloo"}}, (4, "gloo", "a GPU each, or 4")),
        ({"resources": {"gpus_per_node": 4}, "launch": {"nproc_per_node": 2}}, (2, "nccl", "2")),
        ({"resources": {"cpus_per_node": 6}, "launch": {"nproc_per_node": "cpu"}}, (6, "gloo", "6")),
        ({"launch": {"nproc_per_node": 3}}, (3, "gloo", "3")),
        ({"scheduler": {"directives": ["--gres=gpu:a100:8"]}}, (8, "nccl", "a GPU each, or 8")),
        ({"scheduler": {"directives": ["--gpus-per-node 2"]}}, (2, "nccl", "a GPU each, or 2")),
        ({"scheduler": {"directives": ["--gpus=6"]}}, (1, "nccl", "a GPU each, or 1")),
        ({"scheduler": {"directives": ["-G 6"]}, "launch": {"nproc_per_node": 4, "backend": "gloo"}}, (4, "gloo", "4")),
    ],
)
def test_ranks_of_a_node_and_their_backend(tmp_path: Path, job: dict[str, Any], expected: tuple[int, str, str]):
    assert nproc(plan_of(tmp_path, **job)) == expected


@pytest.mark.parametrize(
    ("job", "error", "what"),
    [
        ({"launch": {"launcher": "legacy"}}, JobError, "launcher legacy does not exist on cluster lab"),
        ({"launch": {"nproc_per_node": "cpu"}}, JobError, "one rank per CPU was requested"),
        ({"launch": {"nproc_per_node": "gpu"}}, PreflightError, "one rank per GPU was requested"),
        ({"launch": {"backend": "nccl"}}, PreflightError, "1 rank on 0 GPUs with backend nccl"),
        (
            {"resources": {"gpus_per_node": 2}, "launch": {"nproc_per_node": 4}},
            PreflightError,
            "4 ranks on 2 GPUs with backend nccl",
        ),
        (
            {"launch": {"launcher": "direct"}, "scheduler": {"directives": ["--gpus=6"]}},
            JobError,
            "launcher direct must know the number of ranks on each node",
        ),
        (
            {"scheduler": {"directives": ["--nice\n/bin/evil"]}},
            JobError,
            "scheduler.directives: invalid directive: '--nice\\n/bin/evil'",
        ),
        ({"scheduler": {"partition": "a\nb"}}, JobError, "--partition='a\\nb' cannot be asked for"),
        ({"workdir": "nowhere"}, JobError, "there is no working directory"),
    ],
)
def test_what_cannot_work(tmp_path: Path, job: dict[str, Any], error: type[AllranksError], what: str):
    with pytest.raises(error) as caught:
        plan_of(tmp_path, **job)
    assert caught.value.what.startswith(what)


def test_a_log_in_a_folder_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(JobError) as caught:
        plan_of(tmp_path, scheduler={"output": "logs here/%j.out"})
    assert caught.value.what == f"scheduler.output: there is no directory {tmp_path}/logs here"
    assert caught.value.fix == f"mkdir -p '{tmp_path}/logs here'"
    plan_of(tmp_path, scheduler={"output": "%u/%j.out"})  # Only Slurm knows that directory.
    plan_of(tmp_path, scheduler={"output": "there/%j.out"}, standalone=True)  # Or it is on another machine.


def test_slurms_own_log_in_a_folder_with_a_weird_name(tmp_path: Path):
    workplace = tmp_path / "100% é"
    workplace.mkdir()
    plan = plan_of(workplace)
    log = f"{workplace}/runs/x/slurm-%j.out".replace("100%", "100%%")
    assert [line for line in directives(plan) if line.startswith("--output")] == [f'--output="{log}"']
    assert plan.commands[0].command == ("sbatch", "--parsable", f"{workplace}/runs/x/script.sbatch")


def test_a_folder_whose_name_has_a_line_break_is_refused(tmp_path: Path):
    workplace = tmp_path / "two\nlines"
    workplace.mkdir()
    with pytest.raises(JobError, match="a directive is one line of text"):
        plan_of(workplace)


def test_secrets_come_with_the_environment(tmp_path: Path):
    plan = plan_of(tmp_path, environment={"variables": {"HF_TOKEN": "hf_0123456789", "A": "1"}})
    text = json.dumps(plan.to_json())
    assert "hf_0123456789" not in text
    assert [line for line in plan.files[0].text.splitlines() if line.startswith(": ")] == [
        ': "${HF_TOKEN?set it before you start this script by hand}"'
    ]
    assert plan.commands[0].command[:3] == ("sbatch", "--parsable", "--export=ALL")


def reasons(plan: Plan) -> dict[str, tuple[str, str]]:
    return {reason.subject: (reason.value, reason.why) for reason in plan.reasons}


def test_each_line_has_its_reason(tmp_path: Path):
    job = {"resources": {"nodes": "2", "gpus_per_node": 4, "time": "2min"}, "scheduler": {"partition": "p"}}
    plan = plan_of(tmp_path, {"OMP_NUM_THREADS": "3"}, **job)
    found = reasons(plan)
    assert {line.partition("=")[0] for line in directives(plan)} <= set(found)
    assert found["--partition"] == ("p", "scheduler.partition")
    assert found["--signal"] == ("B:USR1@60", "half of resources.time; retry.warn_before is 120")
    assert found["master"] == ("the first node, a port from the job's id", "free there, and no other job's")
    assert found["GLOO_SOCKET_IFNAME"][0] == found["NCCL_SOCKET_IFNAME"][0] == "decided on each node"
    assert found["OMP_NUM_THREADS"] == ("3", "set in your environment")
    assert "NCCL_SOCKET_IFNAME" not in plan.files[2].text


def test_an_interface_that_is_asked_for_is_not_decided_on_the_nodes(tmp_path: Path):
    plan = plan_of(tmp_path, launch={"interface": "ib0"})
    assert lines(plan, "export GLOO") == ["export GLOO_SOCKET_IFNAME=ib0  # launch.interface"]
    assert lines(plan, "export NCCL") == ["export NCCL_SOCKET_IFNAME=ib0  # launch.interface"]
    assert [value for value in reasons(plan).values() if value[0] == "decided on each node"] == [
        ("decided on each node", "the CPUs that the node gives, shared by its ranks")
    ]


@pytest.mark.parametrize(
    ("job", "note"),
    [
        ({}, "resources.cpus_per_node is not given"),
        (
            {"resources": {"memory": "64"}},
            "resources.memory: 64 MiB on a node; a number without a unit is in megabytes",
        ),
        ({"resources": {"gpu_type": "a100"}}, "resources.gpu_type says nothing"),
        ({"scheduler": {"directives": ["--gpus=6"]}}, "the ranks are counted on the nodes"),
        ({"launch": {"launcher": "direct", "max_restarts": 1}}, "launch.max_restarts: the ranks are started once"),
        ({"launch": {"launcher": "direct"}, "resources": {"nodes": "1:2"}}, "launcher direct asks for a number"),
    ],
)
def test_what_is_not_as_one_may_think_is_said(tmp_path: Path, job: dict[str, Any], note: str):
    assert any(found.startswith(note) for found in plan_of(tmp_path, **job).notes)
    assert plan_of(tmp_path, resources={"cpus_per_node": 4}).notes == ()


def test_what_sbatch_reads_from_the_environment_is_said(tmp_path: Path):
    plan = plan_of(tmp_path, {"SBATCH_QOS": "low", "SBATCH_ACCOUNT": "me"}, resources={"cpus_per_node": 4})
    assert plan.notes == (
        "set in your environment, and for sbatch above what the script asks for: SBATCH_ACCOUNT, SBATCH_QOS",
    )


ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_NODE": "a100:4"}


def test_inside_an_allocation_its_nodes_and_gpus_are_used(tmp_path: Path):
    plan = plan_of(
        tmp_path, ALLOCATION, scheduler={"partition": "p"}, resources={"time": "1h"}, retry={"requeue": True}
    )
    assert (plan.nnodes, plan.nproc_per_node, plan.backend) == (2, 4, "nccl")
    assert plan.commands[0].command == ("bash", f"{tmp_path}/runs/x/script.sh")
    assert (plan.files[0].path, plan.files[0].mode, directives(plan)) == ("script.sh", 0o700, [])
    assert plan.notes == (
        "inside an allocation, which has settled it: scheduler.partition, resources.time not used",
        "retry.requeue: nothing is requeued inside an allocation",
    )


def test_inside_an_allocation_less_can_be_used(tmp_path: Path):
    plan = plan_of(tmp_path, ALLOCATION, resources={"nodes": "1:4", "gpus_per_node": 0})
    assert (plan.nnodes, plan.nproc_per_node, plan.backend) == (2, 1, "gloo")
    assert plan_of(tmp_path, ALLOCATION, resources={"nodes": "1"}).nnodes == 1
    with pytest.raises(PreflightError, match=r"^3 nodes were requested, and this allocation has 2\n"):
        plan_of(tmp_path, ALLOCATION, resources={"nodes": "3"})


def test_a_rank_of_ours_submits_a_job_of_its_own(tmp_path: Path):
    plan = plan_of(tmp_path, {**ALLOCATION, "ALLRANKS_RUN_DIR": "/runs/y"})
    assert plan.commands[0].command[0] == "sbatch"
    assert plan.nnodes == 1


def test_the_plan_needs_no_slurm_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    plan = plan_of(tmp_path, standalone=True)
    assert [file.path for file in plan.files] == ["script.sbatch"]
    assert not [line for line in directives(plan) if line.startswith("--output")]
    assert plan.notes[-1].startswith("a person who submits the script finds Slurm's own log, slurm-<job>.out, where")
    assert sys.executable in plan.files[0].text
