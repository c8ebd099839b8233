"""From a job to the command that gives a shell on the nodes it asks for."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from allranks.clusters.pbs import PbsCluster
from allranks.errors import JobError, PreflightError
from allranks.job.spec import Job

ENVIRON = {"SHELL": "/bin/zsh", "PATH": "/somewhere/bin"}
LEAST = ["qsub", "-I", "-l", "select=1:mpiprocs=1", "-l", "place=scatter"]


def command(*words: str, flavour: str = "openpbs", **job: Any) -> list[str]:
    scheduler = {"flavour": flavour, **job.pop("scheduler", {})}
    made = Job.model_validate({"cluster": "hall", "scheduler": scheduler, **job})
    return list(PbsCluster().shell_command(made, words, ENVIRON, terminal=True))


def split(found: list[str]) -> tuple[list[str], list[str]]:
    """Return the words for qsub, and those of the command behind the environment that it is given."""
    place = found.index("--")
    assert found[place + 1 : place + 3] == ["/bin/bash", "-c"]
    assert found[place + 4 : place + 6] == [str(Path.cwd()), "/somewhere/bin"]
    return found[:place], found[place + 6 :]


def test_a_shell_needs_nothing_but_a_cluster() -> None:
    assert split(command()) == (LEAST, ["/bin/zsh"])
    assert command(flavour="torque") == ["qsub", "-I", "-l", "nodes=1:ppn=1"]


def test_without_a_known_shell_or_pbs_it_is_bash_on_openpbs() -> None:
    found = PbsCluster().shell_command(Job(cluster="hall"), (), {"PATH": ""}, terminal=True)
    assert (list(found[:6]), found[-1]) == (LEAST, "bash")


def test_a_command_starts_in_the_folder_where_it_was_typed_and_keeps_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    told = command("/bin/sh", "-c", 'printf "%s|" "$PWD" "$PATH" "$@"', "sh", "x y", "$HOME", "")
    started = told[told.index("--") + 1 :]
    done = subprocess.run(started, cwd="/", env={"PATH": "/bin"}, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path}/a b|/somewhere/bin|x y|$HOME||"


def test_torque_runs_no_command_there() -> None:
    with pytest.raises(JobError) as caught:
        command("nvidia-smi", flavour="torque")
    assert str(caught.value) == (
        "Torque's qsub -I runs no command\n  fix: allranks shell without one, and type it there"
    )


SCHEDULER = {
    "partition": "p",
    "account": "my lab",
    "resources": ["software=a"],
    "array": "0-3",
    "output": "o",
    "error": "e",
    "directives": [
        *("#PBS -W comment='a b'  # why", "-p 9", "-e y", "-o x", "-k oed", "-j oe", "-r n", "-J 1-2", "-t 1"),
        *("-l walltime=00:05:00", "-v A=1"),
    ],
}


@pytest.mark.parametrize(
    ("flavour", "nodes"),
    [
        ("openpbs", ["-l", "select=2:ncpus=8:ngpus=4:mem=2gb:mpiprocs=1", "-l", "place=scatter"]),
        ("torque", ["-l", "nodes=2:ppn=8:gpus=4", "-l", "mem=4gb"]),
    ],
)
def test_all_that_a_job_asks_for_and_nothing_that_only_a_batch_script_has(flavour: str, nodes: list[str]) -> None:
    resources = {"nodes": 2, "gpus_per_node": 4, "cpus_per_node": 8, "memory": "2G", "time": "1h"}
    found = command(
        flavour=flavour,
        script="my train.py",
        resources=resources,
        scheduler=SCHEDULER,
        retry={"requeue": True},
        notify={"mail": "me@x"},
    )
    assert (split(found)[0] if flavour == "openpbs" else found) == [
        *("qsub", "-I", "-l", "walltime=00:05:00", "-N", "my-train", *nodes, "-l", "walltime=01:00:00"),
        *("-q", "p", "-A", "my lab", "-l", "software=a", "-W", "comment=a b", "-p", "9", "-v", "A=1"),
    ]


@pytest.mark.parametrize(
    ("job", "cpus"),
    [
        ({"launch": {"launcher": "direct", "nproc_per_node": 3}}, "ncpus=3:mpiprocs=1"),
        (
            {"launch": {"launcher": "direct"}, "resources": {"gpus_per_node": 2}},
            "ncpus=2:ngpus=2:mpiprocs=1",
        ),
    ],
)
def test_ranks_that_start_by_themselves_have_a_cpu_each(job: dict[str, Any], cpus: str) -> None:
    assert f"select=1:{cpus}" in command(**job)


def test_a_directive_that_cannot_be_read_is_refused() -> None:
    error = r"^scheduler[.]directives: invalid directive: .*\n  why: No closing quotation\n  fix: close the"
    with pytest.raises(JobError, match=error):
        command(scheduler={"directives": ["-W comment='a"]})


def test_inside_an_allocation_there_is_no_second_one() -> None:
    with pytest.raises(PreflightError) as caught:
        PbsCluster().shell_command(Job(cluster="hall"), (), {"PBS_JOBID": "7.server"}, terminal=True)
    assert str(caught.value) == (
        "this is inside an allocation already: PBS_JOBID is 7.server\n"
        "  fix: allranks run uses it as it is; for another one, leave this shell first"
    )
