"""Running a scheduler's commands once, with a time limit; what goes wrong is explained in the scheduler's words."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from allranks import contract
from allranks.errors import LaunchError, StartCancelledError
from allranks.system.commands import Answer, run_one

if TYPE_CHECKING:
    from allranks.clusters.batch.scheduler import Scheduler
    from allranks.plan.plan import Plan

#: Slurm's commands themselves try for a minute to find a controller; a server under load may take as long.
_SECONDS = 90.0
#: How long a command that submits a job may run on after it has printed the id: a site's own may have more to do.
_AFTER_ID_SECONDS = contract.scaled_wait(10.0)
#: How long it may run on after a signal. Most exit within this time and print the id, so that the job can be cancelled.
_AFTER_SIGNAL_SECONDS = 1.0


def run(
    scheduler: Scheduler,
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    cwd: str | None = None,
    sent: str = "",
    seconds: float = _SECONDS,
    is_over: Callable[[], bool] = lambda: False,
    hear: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Run a command, whatever its exit code, as :func:`run_one` does; if it gives no answer, raise a LaunchError."""
    try:
        answer = run_one(command, environ, cwd=cwd, sent=sent, seconds=seconds, is_over=is_over, hear=hear)
    except LaunchError as error:
        what = f"there is no {scheduler.title} here: {command[0]} cannot be started"
        fix = f"run this where {command[0]} is in PATH, such as {scheduler.place}"
        raise LaunchError(what, why=error.why, fix=fix) from error
    if answer.is_late:
        what = f"{scheduler.title} cannot be reached: {command[0]} gave no answer for {seconds:g} s"
        raise LaunchError(what, fix=scheduler.retry)
    return answer


def run_patiently(scheduler: Scheduler, command: Sequence[str], environ: Mapping[str, str]) -> Answer:
    """Run a command, and try again if the scheduler could not be reached just then."""
    for pause in (0.2, 0.5):
        done = run(scheduler, command, environ)
        if not scheduler.is_away(done):
            return done
        time.sleep(pause)
    return run(scheduler, command, environ)


def run_command(
    scheduler: Scheduler, command: Sequence[str], environ: Mapping[str, str], seconds: float = _SECONDS, gone: str = ""
) -> str:
    """Run a command and return what it printed; raise a LaunchError if it fails, unless with words of ``gone``."""
    answer = run(scheduler, command, environ, seconds=seconds)
    if answer.code and not (gone and re.search(gone, answer.err)):
        raise scheduler.refusal(command, answer.code, answer.out + answer.err)
    return answer.out


def submit(scheduler: Scheduler, plan: Plan, environ: Mapping[str, str], interrupted: Callable[[], int]) -> str:
    """Submit a plan's script, and return the job's id.

    A command that has printed the id and does not exit is killed: the job is submitted. After a signal, whose number
    ``interrupted`` returns, it gets a second.

    Raises:
        LaunchError: the command is not there, the scheduler cannot be reached, or it refuses.
        StartCancelledError: a signal came, and the command has printed no id.
    """
    command, job_id, until = plan.commands[0].command, "", math.inf

    def hear(text: str) -> None:
        nonlocal job_id
        with suppress(LaunchError):
            job_id = scheduler.job_id(text[: text.rfind("\n") + 1])  # Half an id is that of another job.

    def is_over() -> bool:
        nonlocal until
        now, is_interrupted = time.monotonic(), bool(interrupted())
        if job_id or is_interrupted:
            until = min(until, now + (_AFTER_SIGNAL_SECONDS if is_interrupted else _AFTER_ID_SECONDS))
        return now >= until or bool(job_id and is_interrupted)

    try:
        done = run(scheduler, command, environ, cwd=plan.workdir, is_over=is_over, hear=hear)
    except LaunchError as error:
        if job_id:
            return job_id
        if number := interrupted():
            name, lists = scheduler.submit, scheduler.list_jobs
            raise StartCancelledError(
                f"cancelled while {name} was submitting the job",
                number,
                why=f"{name} did not end within a second, and was killed: the job may be submitted all the same",
                fix=f"{lists} lists your jobs, and {scheduler.cancel('')[0]} cancels one",
            ) from None
        raise plan.with_values(error) from error
    if done.code:
        raise plan.with_values(scheduler.refusal(command, done.code, done.out + done.err))
    return scheduler.job_id(done.out)
