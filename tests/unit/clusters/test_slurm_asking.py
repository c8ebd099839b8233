"""Slurm is asked with its own commands; here scripts stand in for them that give recorded answers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_recorded import accounted, accounting, failures, shown, text_of

from allranks.clusters.slurm import SLURM, query_job
from allranks.errors import LaunchError
from allranks.runs.status import State

Answer = Callable[..., dict[str, str]]
UNKNOWN = "slurm_load_jobs error: Invalid job id specified\n"
NO_ACCOUNTING = failures("no-accounting.txt")[0][2]
NO_CONTROLLER = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
ASSOCIATIONS = "see yours with sacctmgr show associations user=$USER format=Account,Partition,QOS"
REFUSED = [
    "set scheduler.partition to one that sinfo --summarize lists and you may use",
    f"change scheduler.account; {ASSOCIATIONS}",
    f"change scheduler.qos; {ASSOCIATIONS}",
    "no node has all that is requested: lower resources; see sinfo --Format=NodeList,CPUs,Memory,Gres",
    "change resources.gpu_type or resources.gpus_per_node; see sinfo --Format=NodeList,Gres",
    "lower resources.memory; see sinfo --Format=NodeList,Memory",
    "lower resources.cpus_per_node; see sinfo --Format=NodeList,CPUs",
    "change resources.time",
    "change scheduler.include or scheduler.exclude; see sinfo --Node",
    "change scheduler.constraint; see sinfo --Format=NodeList,Features",
    "change scheduler.reservation; see scontrol show reservation",
    "name a script that exists and starts with #!",
]
#: Said by a real Slurm 22.05 (the first six), or texts of Slurm's list of errors (slurm_errno.h), not recorded.
MORE_REFUSED = {
    "sbatch: unrecognized option '--bogus'\nTry \"sbatch --help\" for more information": "change scheduler.directives",
    "Invalid time specification (pos=4): now+1h\nsbatch: error: Invalid --start specification": (
        "change scheduler.directives"
    ),
    "sbatch: error: Batch job submission failed: Invalid license specification": (
        "change --licenses in scheduler.directives; see scontrol show licenses"
    ),
    "sbatch: error: Batch job submission failed: Node count specification invalid": "change resources.nodes",
    "sbatch: error: Batch job submission failed: Invalid job array specification": (
        "change scheduler.array; see scontrol show config for MaxArraySize"
    ),
    "sbatch: error: This does not look like a batch script.  The first": "name a script that exists and starts with #!",
    "sbatch: error: Batch job submission failed: User's group not permitted to use this partition": (
        "set scheduler.partition to one that sinfo --summarize lists and you may use"
    ),
    "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS "
    "policy (job submit limit, user's size and/or time limits)": (
        f"ask for less time or fewer nodes, or wait for your other jobs; {ASSOCIATIONS}"
    ),
    "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)": (
        "change resources.time"
    ),
}


@pytest.fixture
def slurm(tmp_path: Path) -> Answer:
    """Give a function that makes a Slurm of given answers, (text, exit code) for each command."""

    def make(**answers: tuple[str, int]) -> dict[str, str]:
        for name, (text, code) in answers.items():
            where = "2" if code else "1"
            script = tmp_path / "bin" / name
            script.parent.mkdir(exist_ok=True)
            log = shlex.quote(str(tmp_path / f"{name}.log"))
            script.write_text(
                f'#!/bin/sh\necho "$@" "$TZ" "$SLURM_TIME_FORMAT" >>{log}\n'
                f"printf %s {shlex.quote(text)} >&{where}\nexit {code}\n"
            )
            script.chmod(0o755)
        return {"PATH": f"{tmp_path}/bin:{os.defpath}", "TZ": "Asia/Tokyo", "SLURM_TIME_FORMAT": "relative"}

    return make


def test_accounting_is_not_asked_about_a_job_that_runs(slurm: Answer, tmp_path: Path) -> None:
    environ = slurm(scontrol=(text_of("running", "scontrol.txt"), 0), sacct=("", 0))
    assert query_job("16", environ) == shown("running")
    assert (tmp_path / "scontrol.log").read_text() == "show job 16 UTC0 standard\n"
    assert not (tmp_path / "sacct.log").exists()


@pytest.mark.parametrize("name", ["completed", "failed", "timeout", "preempted", "node-fail"])
def test_accounting_adds_the_peak_of_memory(slurm: Answer, name: str) -> None:
    environ = slurm(scontrol=(text_of(name, "scontrol.txt"), 0), sacct=(accounting(name), 0))
    assert query_job("1", environ) == replace(shown(name), peak_memory=accounted(name).peak_memory)


def test_accounting_knows_which_step_was_out_of_memory(slurm: Answer) -> None:
    name = "out-of-memory-in-step"
    job = query_job("14", slurm(scontrol=(text_of(name, "scontrol.txt"), 0), sacct=(accounting(name), 0)))
    assert job is not None
    assert (job.state, job.native, job.exit_code) == (State.OUT_OF_MEMORY, "OUT_OF_MEMORY", 1)


def test_accounting_knows_who_cancelled(slurm: Answer) -> None:
    environ = slurm(scontrol=(text_of("cancelled", "scontrol.txt"), 0), sacct=(accounting("cancelled"), 0))
    job = query_job("16", environ)
    assert job is not None
    assert (job.native, job.signal) == ("CANCELLED by 0", 15)


@pytest.mark.parametrize("said", [NO_ACCOUNTING, "sacct: error: Problem talking to the database: Connection refused\n"])
def test_without_accounting(slurm: Answer, said: str) -> None:
    environ = slurm(scontrol=(text_of("failed", "scontrol.txt"), 0), sacct=(said, 1))
    assert query_job("9", environ) == shown("failed")
    assert query_job("9", slurm(scontrol=(UNKNOWN, 1))) is None


def test_without_the_command_of_accounting(slurm: Answer) -> None:
    assert query_job("9", slurm(scontrol=(text_of("failed", "scontrol.txt"), 0))) == shown("failed")


def test_long_after_the_end_accounting_knows(slurm: Answer) -> None:
    environ = slurm(scontrol=(UNKNOWN, 1), sacct=(accounting("timeout"), 0))
    assert query_job("15", environ) == accounted("timeout")


def test_the_cluster_that_took_the_job_is_asked(slurm: Answer, tmp_path: Path) -> None:
    query_job("15_3;west", slurm(scontrol=(UNKNOWN, 1), sacct=(accounting("timeout"), 0)))
    assert (tmp_path / "scontrol.log").read_text() == "--clusters=west show job 15_3 UTC0 standard\n"
    account = "--clusters=west --parsable2 --noheader --format=JobID,State,ExitCode,Start,End,NodeList,MaxRSS,Reason"
    assert (tmp_path / "sacct.log").read_text() == f"{account} --jobs 15_3 UTC0 standard\n"


@pytest.mark.parametrize("name", ["running", "requeued"])
def test_what_the_controller_does_not_know_does_not_run(slurm: Answer, name: str) -> None:
    assert query_job("16", slurm(scontrol=(UNKNOWN, 1), sacct=(accounting(name), 0))) is None


def test_an_array_stands_as_the_task_that_decides(slurm: Answer) -> None:
    def array(*names: str) -> dict[str, str]:
        texts = [text_of(name, "scontrol.txt") for name in names]
        return slurm(scontrol=("".join(texts), 0), sacct=(NO_ACCOUNTING, 1))

    assert query_job("1", array("completed", "pending-held", "running", "failed")) == shown("running")
    assert query_job("1", array("completed", "pending-held", "failed")) == shown("pending-held")
    assert query_job("1", array("completed", "timeout")) == shown("timeout")
    assert query_job("1", array("completed", "completed")) == shown("completed")


def test_a_task_of_an_array_that_the_controller_has_forgotten_decides(slurm: Answer) -> None:
    """It forgets each task some minutes after the end of that task, not of the array."""
    told = accounting("completed") + accounting("failed")
    found = query_job("1", slurm(scontrol=(text_of("completed", "scontrol.txt"), 0), sacct=(told, 0)))
    assert found is not None
    assert (found.job_id, found.state) == (shown("failed").job_id, State.FAILED)


def test_without_a_controller(slurm: Answer) -> None:
    with pytest.raises(LaunchError) as caught:
        query_job("9", slurm(scontrol=(NO_CONTROLLER, 1)))
    assert str(caught.value) == (
        "Slurm cannot be reached\n"
        "  why: Unable to contact slurm controller (connect failure)\n"
        "  fix: see scontrol ping, and try again when it is up"
    )


def test_without_slurm(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        query_job("9", {"PATH": str(tmp_path)})
    assert str(caught.value) == (
        "there is no Slurm here: scontrol cannot be started\n"
        "  why: No such file or directory\n"
        "  fix: run this where scontrol is in PATH, such as the cluster's login node; "
        "some sites need module load slurm"
    )


def test_an_answer_that_does_not_come(slurm: Answer) -> None:
    environ = slurm(sbatch=("", 0))
    with pytest.raises(LaunchError) as caught:
        SLURM.output(["sleep", "60"], environ, seconds=0.1)
    assert caught.value.what == "Slurm cannot be reached: sleep gave no answer for 0.1 s"


def test_a_command_runs_as_it_is_given(slurm: Answer, tmp_path: Path) -> None:
    folder = tmp_path / "my work"
    folder.mkdir()
    environ = slurm(sbatch=("7\n", 0))
    assert SLURM.run(["sbatch", "a b"], environ, cwd=folder).out == "7\n"
    assert (tmp_path / "sbatch.log").read_text() == "a b Asia/Tokyo relative\n"
    assert SLURM.run(["pwd"], environ, cwd=folder).out == f"{folder}\n"


@pytest.mark.parametrize(
    ("failure", "fix"), [*zip((f for f in failures("refused.txt") if f[0][0] == "sbatch"), REFUSED, strict=True)]
)
def test_refused_jobs(slurm: Answer, failure: tuple[list[str], int, str], fix: str) -> None:
    command, code, said = failure
    with pytest.raises(LaunchError) as caught:
        SLURM.output(command, slurm(sbatch=(said, code)))
    last = said.splitlines()[-1].removeprefix("sbatch: error: ").removeprefix("Batch job submission failed: ")
    assert (caught.value.what, caught.value.fix) == ("Slurm refuses the job", fix)
    assert caught.value.why is not None and caught.value.why.split("; ")[-1] == last


@pytest.mark.parametrize("said", MORE_REFUSED)
def test_other_refused_jobs(said: str) -> None:
    error = SLURM.refusal(["sbatch", "job.sh"], 1, said)
    assert (error.what, error.fix) == ("Slurm refuses the job", MORE_REFUSED[said])


@pytest.mark.parametrize("failure", failures("no-controller.txt"), ids=lambda failure: failure[0][0])
def test_no_controller(failure: tuple[list[str], int, str]) -> None:
    error = SLURM.refusal(*failure)
    assert (error.what, error.fix) == ("Slurm cannot be reached", "see scontrol ping, and try again when it is up")


def test_no_configuration() -> None:
    said = (
        "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "sbatch: fatal: Could not establish a configuration source\n"
    )
    assert str(SLURM.refusal(["sbatch"], 1, said)) == (
        "Slurm cannot be reached\n"
        "  why: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host; "
        "Could not establish a configuration source\n"
        "  fix: run this where sbatch works, such as the login node, or set SLURM_CONF to the path of its slurm.conf"
    )


def test_what_nobody_knows_is_handed_on() -> None:
    said = "sbatch: error: Ask Ada first\nsbatch: error: Ask Ada first\n"
    assert str(SLURM.refusal(["sbatch"], 1, said)) == "Slurm refuses the job\n  why: Ask Ada first"
    silent = SLURM.refusal(["scancel", "1"], 8, "")
    fix = "type it to see more: scancel 1"
    assert str(silent) == f"scancel failed\n  why: scancel ended with 8 and said nothing\n  fix: {fix}"
    other = SLURM.refusal(["scontrol", "update"], 1, "Invalid partition name specified")
    fix = "type it to see more: scontrol update"
    assert str(other) == f"scontrol failed\n  why: Invalid partition name specified\n  fix: {fix}"
