"""Running the commands of a scheduler."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.commands import run_one
from allranks.errors import LaunchError

if TYPE_CHECKING:
    from allranks.clusters.refusals import Refusals
    from allranks.plan.plan import Plan

#: How long a command that submits a job may take: Slurm's own tries for a minute to find a controller.
_SUBMIT_SECONDS = 90.0
#: How long a command that submits a job may go on after it has told the job's id: a site's own may have more to do.
_AFTER_ID_SECONDS = contract.scaled_wait(10.0)
#: How long it may go on after a signal. Most end within this time and tell the id, so that the job can be cancelled.
_AFTER_SIGNAL_SECONDS = 1.0


def ask(
    command: Sequence[str],
    environ: Mapping[str, str],
    refusals: Refusals,
    *,
    cwd: str | Path | None = None,
    seconds: float,
) -> str:
    """Run a command of a scheduler's and return its answer.

    Args:
        command: the command.
        environ: its environment.
        refusals: what to say where it fails.
        cwd: its working directory.
        seconds: how long it may take.

    Raises:
        LaunchError: the command is not there, the scheduler cannot be reached, or it refuses.
    """
    done = run(command, environ, refusals, cwd=cwd, seconds=seconds)
    if done.returncode:
        raise refusals.refusal(command, done.returncode, done.stdout + done.stderr)
    return done.stdout


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    refusals: Refusals,
    *,
    cwd: str | Path | None = None,
    sent: str = "",
    seconds: float,
    is_over: Callable[[], bool] = lambda: False,
    hear: Callable[[str], None] = lambda _: None,
) -> subprocess.CompletedProcess[str]:
    """Run a command of a scheduler's, as :func:`ask` does, whatever it ends with.

    ``sent`` is its stdin; ``is_over`` and ``hear`` are those of :func:`~allranks.clusters.commands.run_one`.

    Raises:
        LaunchError: the command is not there, or gives no answer.
    """
    try:
        answer = run_one(command, environ, cwd=cwd, sent=sent, seconds=seconds, is_over=is_over, hear=hear)
    except LaunchError as error:
        assert isinstance(error.__cause__, OSError)
        raise refusals.not_there(command[0], error.__cause__) from error
    if answer.is_late:
        raise refusals.no_answer(command[0], seconds)
    return subprocess.CompletedProcess(command, answer.code, answer.out, answer.err)


def submit(
    plan: Plan,
    environ: Mapping[str, str],
    refusals: Refusals,
    parse: Callable[[str], str],
    interrupted: Callable[[], int],
) -> str:
    """Run the command that submits a plan's script, and return the job's id.

    A command that has told the id and does not end is killed: the job is submitted. After a signal it gets a second.

    Args:
        plan: the plan.
        environ: the command's environment.
        refusals: what to say where it fails.
        parse: returns the id in what the command has said; raises LaunchError if there is none.
        interrupted: returns the number of the signal that has asked for the run's end; 0 if none has.

    Raises:
        LaunchError: the command is not there, the scheduler cannot be reached, or it refuses.
        StartCancelledError: a signal came, and the command has told no id.
    """
    command = plan.commands[0].command
    told = _Told(parse, interrupted)
    try:
        done = run(
            command,
            environ,
            refusals,
            cwd=plan.workdir,
            seconds=_SUBMIT_SECONDS,
            is_over=told.is_long_enough_ago,
            hear=told.hear,
        )
    except LaunchError:
        if told.job_id:
            return told.job_id
        if number := interrupted():
            raise refusals.cancelled(number) from None
        raise
    if done.returncode:
        raise refusals.refusal(command, done.returncode, done.stdout + done.stderr)
    return parse(done.stdout)


class _Told:
    """What a command that submits a job has told so far: its id, perhaps."""

    def __init__(self, parse: Callable[[str], str], interrupted: Callable[[], int]) -> None:
        self.job_id = ""
        self._parse, self._interrupted = parse, interrupted
        self._until = math.inf

    def hear(self, text: str) -> None:
        """Look for the id in whole lines: half an id is that of another job."""
        with suppress(LaunchError):
            self.job_id = self._parse(text[: text.rfind("\n") + 1])

    def is_long_enough_ago(self) -> bool:
        """Tell whether the command need not be waited for any more."""
        is_interrupted = bool(self._interrupted())
        if self.job_id and is_interrupted:
            return True
        if self.job_id or is_interrupted:
            patience = _AFTER_SIGNAL_SECONDS if is_interrupted else _AFTER_ID_SECONDS
            self._until = min(self._until, time.monotonic() + patience)
        return time.monotonic() >= self._until
