"""From a job to the command that gives a shell on the nodes it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.clusters.slurm import SlurmCluster
from allranks.errors import JobError, PreflightError
from allranks.job.spec import Job

shell_command = SlurmCluster().shell_command
STEP = ["srun", "--interactive", "--preserve-env", "--pty"]
LEAST = ["salloc", "--nodes=1", "--ntasks-per-node=1"]


def command(*words: str, terminal: bool = True, **job: Any) -> list[str]:
    made = Job.model_validate({"cluster": "lab", **job})
    return list(shell_command(made, words, {"SHELL": "/bin/zsh"}, terminal=terminal))


def test_a_shell_needs_nothing_but_a_cluster():
    assert command() == [*LEAST, *STEP, "/bin/zsh"]


def test_without_a_known_shell_it_is_bash():
    assert shell_command(Job(cluster="lab"), (), {}, terminal=True)[-1] == "bash"


def test_a_command_takes_the_place_of_the_shell_and_keeps_its_words():
    assert command("echo", "a b", "$HOME", terminal=False) == [*LEAST, *STEP[:-1], "echo", "a b", "$HOME"]


@pytest.mark.parametrize("launcher", ["torchrun", "direct"])
def test_all_that_a_job_asks_for_and_nothing_that_only_a_batch_script_has(launcher: str):
    asked = command(
        script="my train.py",
        resources={
            "nodes": 2,
            "gpus_per_node": 4,
            "gpu_type": "a100",
            "cpus_per_node": 8,
            "memory": "2G",
            "time": "1h",
        },
        launch={"launcher": launcher},
        retry={"requeue": True, "warn_before": 60},
        notify={"mail": "me@x"},
        scheduler={
            "partition": "p",
            "account": "my lab",
            "include": "n[1-2]",
            "array": "0-3",
            "output": "o",
            "error": "e",
            "directives": ["#SBATCH --comment='a b'  # why", "--nice 9", "--wait-all-nodes=1", "--output=x", "-e y"],
        },
    )
    tasks = {"torchrun": ["--ntasks-per-node=1"], "direct": ["--ntasks-per-node=4"]}[launcher]
    cpus = {"torchrun": "--cpus-per-task=8", "direct": "--cpus-per-task=2"}[launcher]
    assert asked == [
        *("salloc", "--job-name=my-train", "--nodes=2", *tasks, "--gpus-per-node=a100:4", cpus),
        *("--mem=2G", "--time=01:00:00", "--partition=p", "--account=my lab", "--nodelist=n[1-2]"),
        *("--comment=a b", "--nice", "9", "--wait-all-nodes=1", *STEP, "/bin/zsh"),
    ]


def test_a_directive_that_cannot_be_read_is_refused():
    with pytest.raises(JobError, match=r"^scheduler[.]directives: invalid directive: .*"):
        command(scheduler={"directives": ["--comment='a"]})


def test_inside_an_allocation_there_is_no_second_one():
    with pytest.raises(PreflightError, match="SLURM_JOB_ID is 7"):
        shell_command(Job(cluster="lab"), (), {"SLURM_JOB_ID": "7"}, terminal=True)


def test_a_cluster_without_a_queue_says_what_to_do_instead(allranks):
    result = allranks("shell")
    assert (result.rc, result.stdout) == (2, "")
    assert result.stderr == (
        "error: cluster local has no queue that could give a shell\n"
        "  why: it has no scheduler: allranks run starts jobs there at once\n"
        "  fix: --on a cluster with a scheduler, or ssh HOST for a shell on another machine\n"
    )


def test_what_is_neither_a_job_file_nor_after_two_hyphens_is_refused(allranks):
    result = allranks("shell", "nvidia-smi")
    assert (result.rc, result.stdout) == (2, "")
    error = "error: nvidia-smi is not a job file\n  fix: what runs there follows --: -- nvidia-smi ...\n"
    assert result.stderr == error


def test_salloc_that_is_not_there_is_told_after_the_request(allranks, tmp_path: Path):
    (tmp_path / "squeue").write_text("#!/bin/sh\n")
    (tmp_path / "squeue").chmod(0o755)
    allranks.script("lab: {kind: slurm}\n", "clusters.yaml")
    result = allranks("shell", "--on", "lab", "--nodes", "2", PATH=str(tmp_path), SHELL="/bin/sh")
    assert (result.rc, result.stdout) == (1, "")
    assert result.stderr == (
        "allranks: salloc --nodes=2 --ntasks-per-node=1 srun --interactive --preserve-env /bin/sh\n"
        "error: salloc cannot be started\n"
        "  why: No such file or directory\n"
        "  fix: run this where salloc is in PATH, such as the cluster's login node\n"
    )
