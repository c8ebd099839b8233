"""What a job leaves open of its folder, interpreter and environment, settled for every kind of cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.errors import JobError

if TYPE_CHECKING:
    from allranks.job.spec import Environment, Job


def workdir_of(job: Job, folder: Path) -> Path:
    """Return the absolute working directory of the ranks.

    Args:
        job: the job.
        folder: absolute folder that relative paths of the job are relative to.

    Raises:
        JobError: there is no such folder.
    """
    workdir = Path(os.path.normpath(folder / job.workdir))
    if not workdir.is_dir():
        raise JobError(f"there is no working directory {workdir}", fix="workdir (--workdir) must be a folder")
    return workdir


def python_of(job: Job, *, elsewhere: bool = False) -> tuple[str, ...]:
    """Return the command line of the ranks' interpreter: as asked, that of their environment, or this one.

    Args:
        job: the job.
        elsewhere: whether the ranks run where this interpreter is not.
    """
    chosen = job.environment
    if chosen.python:
        return chosen.python
    if chosen.conda or chosen.venv:
        return ("python",)
    return ("python3",) if elsewhere else (sys.executable,)


def environment_of(job: Job, folder: Path) -> Environment:
    """Return the job's environment with an absolute path to its virtual environment."""
    venv = job.environment.venv
    return job.environment.model_copy(update={"venv": str(folder / venv)}) if venv else job.environment


def unused_scheduler(job: Job, *but: str) -> tuple[str, ...]:
    """Return the note that a job asks a scheduler for something where there is none, if it does.

    Args:
        job: the job.
        but: names of what is used without a scheduler too.
    """
    defaults = type(job.scheduler)()
    asked = [name for name, value in job.scheduler if value != getattr(defaults, name)]
    used = [f"scheduler.{name}" for name in asked if name not in but]
    return (f"there is no scheduler here: {', '.join(used)} not used",) if used else ()


def only_over_ssh(job: Job) -> tuple[str, ...]:
    """Return the notes that a job asks for what runs over SSH alone have, where it runs elsewhere."""
    asked = {"launch.attach": job.launch.attach, "sync": job.sync.method != "none"}
    return tuple(f"{name} is for runs over SSH, and not used here" for name, is_asked in asked.items() if is_asked)
