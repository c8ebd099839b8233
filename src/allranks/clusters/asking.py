"""Running the commands of a scheduler."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allranks.clusters.refusals import Refusals


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
) -> subprocess.CompletedProcess[str]:
    """Run a command of a scheduler's, as :func:`ask` does, whatever it ends with; ``sent`` is its stdin.

    Raises:
        LaunchError: the command is not there, or gives no answer.
    """
    try:
        return subprocess.run(
            command,
            env=environ,
            cwd=cwd,
            timeout=seconds,
            input=sent,
            capture_output=True,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C must not end a command whose job is already in the queue.
        )
    except OSError as error:
        raise refusals.not_there(command[0], error) from error
    except subprocess.TimeoutExpired as error:
        raise refusals.no_answer(command[0], seconds) from error
