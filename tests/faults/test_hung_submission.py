"""The command that submits a job hangs, before or after it has told the job's id; scripts stand in for schedulers."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from waiting import is_alive, wait_for

ANSWERS = Path(__file__).parents[1] / "cluster/answers"
#: Far less than the 90 s that a scheduler's command may take.
SOON = 45.0


@dataclass
class Lab:
    """A cluster whose submitting command tells what it is given to say, and hangs.

    Attributes:
        allranks: the command.
        job: the id of its job.
        submit: the submitting command.
        may_be_left: what is said where the id was not told.
    """

    allranks: Any
    job: str
    submit: str
    may_be_left: str

    def make(self, says: str) -> None:
        """Make the submitting command, which says so and hangs."""
        file = self.allranks.folder / "hangs"
        self.command(self.submit, f"{says}\necho $$ >'{file}.tmp'; mv '{file}.tmp' '{file}'; exec sleep 300")

    def command(self, name: str, text: str) -> None:
        self.allranks.script(f"#!/bin/sh\n{text}\n", f"bin/{name}").chmod(0o755)

    @property
    def hung(self) -> int:
        """The process that hangs, as soon as it does."""
        file = self.allranks.folder / "hangs"
        wait_for("the command that submits", file.exists)
        return int(file.read_text())

    @property
    def is_cancelled(self) -> bool:
        return (self.allranks.folder / "cancelled").exists()


@pytest.fixture(params=["slurm", "pbs"])
def lab(allranks, request) -> Lab:
    """Give a cluster on which a job runs until it is cancelled."""
    folder = allranks.folder
    (folder / "bin").mkdir()
    allranks.env["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
    allranks.script("")
    allranks.script(f"lab: {{kind: {request.param}}}\n", "clusters.yaml")
    told = f"if [ -e '{folder}/cancelled' ]; then cat '{{}}/{{}}'; else cat '{{}}/{{}}'; fi"
    cancel = f"touch '{folder}/cancelled'"
    if request.param == "slurm":
        recorded = ANSWERS / "slurm-22.05"
        made = Lab(allranks, "16", "sbatch", "squeue --me lists your jobs, and scancel cancels one")
        made.command("scontrol", told.format(recorded, "cancelled/scontrol.txt", recorded, "running/scontrol.txt"))
        made.command("scancel", cancel)
    else:
        recorded = ANSWERS / "openpbs-23.06"
        made = Lab(allranks, "260.pbsctl", "qsub", "qstat -u $USER lists your jobs, and qdel cancels one")
        version = 'if [ "$1" = --version ]; then echo pbs_version = 23.06.06; exit; fi\n'
        made.command("qstat", version + told.format(recorded, "cancelled.txt", recorded, "running.txt"))
        made.command("qdel", cancel)
    return made


def _signalled(lab: Lab, process: Any, number: int) -> str:
    """Send a signal while the command hangs; return what is said until both have ended, which is soon."""
    hung = lab.hung
    began = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=SOON)
    assert process.returncode == 128 + number, err.decode()
    assert time.monotonic() - began < SOON
    assert not is_alive(hung)
    status = lab.allranks.record()["status"]
    assert (status["state"], status["exit_code"]) == ("CANCELLED", 128 + number)
    return str(err.decode())


def test_a_job_that_was_submitted_is_on_record_although_the_command_hangs(lab) -> None:
    lab.make(f"echo {lab.job}")
    done = lab.allranks("run", "train.py", "--on", "lab", "--detach", timeout=SOON)
    assert (done.rc, lab.allranks.record()["handle"]["job_id"]) == (0, lab.job), done.stderr
    assert not is_alive(lab.hung)
    assert lab.allranks("cancel").rc == 0
    assert (lab.is_cancelled, lab.allranks.record()["status"]["state"]) == (True, "CANCELLED")


def test_half_an_id_is_none(lab) -> None:
    lab.make(f"printf {lab.job[:2]}")
    process = lab.allranks.popen("run", "train.py", "--on", "lab")
    _signalled(lab, process, signal.SIGINT)
    assert (lab.is_cancelled, lab.allranks.record()["handle"]["job_id"]) == (False, None)


@pytest.mark.parametrize("options", [(), ("--detach",)], ids=["followed", "detached"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_before_the_id(lab, number, options) -> None:
    lab.make("")
    process = lab.allranks.popen("run", "train.py", "--on", "lab", *options)
    assert _signalled(lab, process, number) == (
        f"error: cancelled while {lab.submit} was submitting the job\n"
        f"  why: {lab.submit} did not end within a second, and was killed: the job may be submitted all the same\n"
        f"  fix: {lab.may_be_left}\n"
    )


@pytest.mark.parametrize("options", [(), ("--detach",)], ids=["followed", "detached"])
def test_a_signal_after_the_id_cancels_the_job(lab, options) -> None:
    lab.make(f"echo {lab.job}")
    process = lab.allranks.popen("run", "train.py", "--on", "lab", *options, _ALLRANKS_WAITS="1")
    said = _signalled(lab, process, signal.SIGINT)
    assert f"allranks: SIGINT: job {lab.job} is being cancelled; " in said
    assert (lab.is_cancelled, lab.allranks.record()["handle"]["job_id"]) == (True, lab.job)


def test_ctrl_c_ends_a_check_whose_scheduler_hangs(lab) -> None:
    """On Slurm it is asked by ``sbatch --test-only`` first what it would do; on PBS the job that looks is submitted."""
    lab.make("")
    process = lab.allranks.popen("check", "train.py", "--on", "lab", "--only", "nodes")
    hung = lab.hung
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SOON)
    assert process.returncode == 130, err.decode()
    assert not is_alive(hung)
