"""From a job to what is executed on a cluster of kind PBS, and why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.clusters.base import Request
from allranks.clusters.pbs import PbsCluster
from allranks.errors import AllranksError, JobError, LaunchError, PreflightError
from allranks.job.spec import Job
from allranks.plan.plan import Plan

#: Nothing of this machine tells which PBS is here.
NOWHERE = {"PATH": ""}


def plan_of(folder: Path, environ: dict[str, str] = NOWHERE, *, standalone: bool = False, **job: Any) -> Plan:
    """Plan a job that is given as the sections of a job file."""
    (folder / "train.py").touch()
    made = Job.model_validate({"script": "train.py", "cluster": "hall", **job})
    return PbsCluster().plan(Request(made, folder, folder / "runs" / "x", environ, standalone))


def directives(plan: Plan) -> list[str]:
    found = [line for line in plan.files[0].text.splitlines() if line.startswith("#PBS ")]
    return [line.removeprefix("#PBS ") for line in found]


def orders(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan.files[1].text)
    return found


def lines(plan: Plan, start: str) -> list[str]:
    """Return the lines of the script that start so."""
    return [line.strip() for line in plan.files[0].text.splitlines() if line.strip().startswith(start)]


def qstat(folder: Path, version: str) -> dict[str, str]:
    """Make a qstat that says this of itself; return an environment in which it is found."""
    folder.mkdir(exist_ok=True)
    (folder / "qstat").write_text(f"#!/bin/sh\necho '{version}' >&2\n")
    (folder / "qstat").chmod(0o755)
    return {"PATH": str(folder)}


def test_nothing_else_is_asked_for(tmp_path: Path) -> None:
    assert directives(plan_of(tmp_path)) == [
        "-N train",
        "-S /bin/bash",
        "-l select=1:mpiprocs=1",
        "-l place=scatter",
        "-j oe",
        f"-o {tmp_path}/runs/x/pbs.out",
        "-r y",
    ]


OPENPBS, TORQUE = "pbs_version = 23.06.06", "Version: 6.1.3"


@pytest.mark.parametrize(
    ("said", "asked", "request_for_nodes"),
    [
        (OPENPBS, None, "-l select=1:mpiprocs=1"),
        (TORQUE, None, "-l nodes=1:ppn=1"),
        (OPENPBS, "torque", "-l nodes=1:ppn=1"),
        (TORQUE, "openpbs", "-l select=1:mpiprocs=1"),
    ],
)
def test_which_pbs_it_is(tmp_path: Path, said: str, asked: str | None, request_for_nodes: str) -> None:
    plan = plan_of(tmp_path, qstat(tmp_path / "bin", said), scheduler={"flavour": asked} if asked else {})
    assert request_for_nodes in directives(plan)
    assert not [note for note in plan.notes if "no qstat here" in note]


def test_without_a_qstat_it_is_taken_for_openpbs_which_is_said(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert plan.notes[0] == "no qstat here shows which PBS this is: OpenPBS is assumed (scheduler.flavour)"
    assert "-l select=1:mpiprocs=1" in directives(plan)


def test_another_qstat_is_refused(tmp_path: Path) -> None:
    environ = qstat(tmp_path / "bin", "SGE 8.1.9")
    with pytest.raises(LaunchError, match=r"^this qstat is not PBS'\n"):
        plan_of(tmp_path, environ)
    plan_of(tmp_path, environ, scheduler={"flavour": "openpbs"})


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({}, (1, "gloo", "1")),
        ({"resources": {"gpus_per_node": 4}}, (4, "nccl", "4")),
        ({"resources": {"gpus_per_node": 4}, "launch": {"nproc_per_node": 2}}, (2, "nccl", "2")),
        ({"resources": {"cpus_per_node": 6}, "launch": {"nproc_per_node": "cpu"}}, (6, "gloo", "6")),
        ({"scheduler": {"directives": ["-l select=2:ngpus=8"]}}, (8, "nccl", "8")),
        ({"scheduler": {"directives": ["-l nodes=1:ppn=9:gpus=2"], "flavour": "torque"}}, (2, "nccl", "2")),
    ],
)
def test_ranks_of_a_node_and_their_backend(tmp_path: Path, job: dict[str, Any], expected: tuple[int, str, str]) -> None:
    plan = plan_of(tmp_path, **job)
    assert (plan.nproc_per_node, plan.backend, str(orders(plan)["nproc_per_node"])) == expected


@pytest.mark.parametrize(
    ("value", "nodes"),
    [
        ("select=3:ngpus=2", 3),
        ("select=ngpus=2", 1),
        ("select=1:ngpus=2:host=a+2:ngpus=2", 3),
        ("walltime=60,select=2:ngpus=2,place=scatter", 2),
        ("nodes=a:gpus=2+b:gpus=2", 2),
    ],
)
def test_a_users_own_request_for_nodes_counts(tmp_path: Path, value: str, nodes: int) -> None:
    plan = plan_of(tmp_path, scheduler={"directives": [f"#PBS -l {value}"]}, retry={"max_attempts": 1})
    assert (plan.nnodes, orders(plan)["min_nodes"], plan.nproc_per_node) == (nodes, nodes, 2)
    assert directives(plan)[0] == f"-l {value}"
    others = [line for line in directives(plan)[1:] if line.startswith(("-l select", "-l nodes", "-l place"))]
    assert others == (["-l place=scatter"] if value.startswith("select") else [])
    assert plan_of(tmp_path, scheduler={"directives": [f"-l {value}"]}, resources={"nodes": nodes}).nnodes == nodes


@pytest.mark.parametrize(
    ("job", "error", "what"),
    [
        ({"launch": {"launcher": "legacy"}}, JobError, "launcher legacy does not exist on cluster hall"),
        ({"launch": {"agent": False}}, JobError, "launch.agent cannot be false on cluster hall"),
        ({"launch": {"nproc_per_node": "cpu"}}, JobError, "one rank per CPU was requested"),
        (
            {"launch": {"launcher": "direct"}, "scheduler": {"directives": ["-l select=1:ngpus=2+1:ngpus=4"]}},
            JobError,
            "launcher direct must know the number of ranks on each node",
        ),
        (
            {"resources": {"nodes": "3"}, "scheduler": {"directives": ["-l select=1:ncpus=2+1"]}},
            JobError,
            "3 nodes are requested by resources.nodes, and 2 by scheduler.directives\n"
            "  why: scheduler.directives: -l select=1:ncpus=2+1\n"
            "  fix: leave one of them out",
        ),
        ({"launch": {"backend": "nccl"}}, PreflightError, "1 rank on 0 GPUs with backend nccl"),
        ({"workdir": "nowhere"}, JobError, "there is no working directory"),
        (
            {"scheduler": {"output": "logs here/a.log"}},
            JobError,
            "scheduler.output: there is no directory {folder}/logs here\n  why: nothing could be written there\n"
            "  fix: mkdir -p '{folder}/logs here'",
        ),
    ],
)
def test_what_cannot_work(tmp_path: Path, job: dict[str, Any], error: type[AllranksError], what: str) -> None:
    with pytest.raises(error) as caught:
        plan_of(tmp_path, **job)
    assert str(caught.value).startswith(what.format(folder=tmp_path))


@pytest.mark.parametrize(
    ("folder", "is_named"), [("100 é", True), ("a:b", False), ("two\nlines", False), ("5%", False), ("it's", False)]
)
def test_pbs_own_log_in_a_folder_with_a_weird_name(tmp_path: Path, folder: str, is_named: bool) -> None:
    workplace = tmp_path / folder
    workplace.mkdir()
    plan = plan_of(workplace)
    named = [line for line in directives(plan) if line.startswith("-o")]
    assert named == ([f'-o "{workplace}/runs/x/pbs.out"'] if is_named else [])
    note = "what PBS itself says is where qsub is typed, in train.o<job>, when the job has ended"
    assert (note in plan.notes) is not is_named
    assert plan.commands[0].command == ("qsub", f"{workplace}/runs/x/script.pbs")


def test_secrets_come_in_a_file_or_with_qsub_where_there_is_none(tmp_path: Path) -> None:
    variables = {"HF_TOKEN": "hf_0123456789", "X_KEY": "k_0123456789", "A": "1"}
    plan = plan_of(tmp_path, environment={"variables": variables})
    assert "_0123456789" not in json.dumps(plan.to_json())
    by_hand = "submit this script with it: qsub -v HF_TOKEN,X_KEY"
    submitted = ': "${PBS_JOBID:?is not set: qsub this script}"'
    assert lines(plan, ": ") == [*(f': "${{{name}?{by_hand}}}"' for name in ("HF_TOKEN", "X_KEY")), submitted]
    file = f"{tmp_path}/runs/x/secrets.sh"
    assert lines(plan, "[ ! -r") == [f"[ ! -r {file} ] || . {file}"]
    assert plan.commands[0].command == ("qsub", f"{tmp_path}/runs/x/script.pbs")
    alone = plan_of(tmp_path, standalone=True, environment={"variables": variables})
    assert alone.commands[0].command == ("qsub", "-v", "HF_TOKEN,X_KEY", f"{tmp_path}/runs/x/script.pbs")


def reasons(plan: Plan) -> dict[str, tuple[str, str]]:
    return {reason.subject: (reason.value, reason.why) for reason in plan.reasons}


def test_each_line_has_its_reason(tmp_path: Path) -> None:
    job = {"resources": {"nodes": "2", "time": "2min"}, "scheduler": {"partition": "p", "output": "o", "error": "/e"}}
    plan = plan_of(tmp_path, **job)
    found = reasons(plan)
    assert found["-q"] == ("p", "scheduler.partition")
    assert found["-l select"] == ("2:mpiprocs=1", "resources, for each node")
    assert found["-l walltime"] == ("00:02:00", "resources.time")
    assert found["master"] == ("the first node, a port from the job's id", "free there, and no other job's")
    assert found["scheduler.output"] == (f"{tmp_path}/o", "what the script prints")
    assert found["scheduler.error"] == ("/e", "what the script prints")
    assert len([subject for subject in found if subject.startswith("-")]) == len(directives(plan))


@pytest.mark.parametrize(
    ("job", "note"),
    [
        (
            {"name": "a-name-of-18-chars"},
            "PBS knows the job as a-name-of-18-ch: other names it may not take",
        ),
        (
            {"resources": {"nodes": "2:4", "cpus_per_node": 4}},
            "resources.nodes: PBS always gives the same number of nodes: 4",
        ),
        ({"resources": {"spares": 1, "nodes": 2}}, "resources.spares: nodes are kept ready over SSH only"),
        (
            {"resources": {"gpu_type": "a100"}},
            "resources.gpu_type is not used: sites have names of their own; scheduler.constraint: gpu_model=a100",
        ),
        ({"resources": {}}, "resources.cpus_per_node is not given: most sites then give one CPU"),
        (
            {"launch": {"launcher": "direct", "max_restarts": 1}},
            "launch.max_restarts: the ranks are started once; launcher torchrun starts them again",
        ),
        ({"resources": {"hosts": ["a"]}}, "resources.hosts is not used: PBS chooses the nodes; scheduler.include"),
    ],
)
def test_what_is_not_as_one_may_think_is_said(tmp_path: Path, job: dict[str, Any], note: str) -> None:
    scheduler = {"flavour": "openpbs"}
    assert any(found.startswith(note) for found in plan_of(tmp_path, scheduler=scheduler, **job).notes)
    assert plan_of(tmp_path, scheduler=scheduler, resources={"cpus_per_node": 4}).notes == ()


def test_a_range_of_nodes_is_its_end(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, resources={"nodes": "2:4"})
    assert (plan.nnodes, orders(plan)["min_nodes"]) == (4, 4)
    assert "-l select=4:mpiprocs=1" in directives(plan)


def test_the_plan_needs_no_pbs_here(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, standalone=True, scheduler={"output": "there/is/no/folder"})
    assert [file.path for file in plan.files] == ["script.pbs"]
    assert not [line for line in directives(plan) if line.startswith("-o")]
    assert "what PBS itself says is where qsub is typed, in train.o<job>, when the job has ended" in plan.notes
    assert sys.executable in plan.files[0].text
