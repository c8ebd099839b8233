"""Running the commands of a scheduler from inside of one of its jobs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from allranks import contract

_SECONDS = 60.0
#: The id of a job, in a last line that is whole.
_TOLD_ID = re.compile(r"^\d[\w.;\[\]-]*\n\Z", re.MULTILINE)


def ask(command: Sequence[str], environ: Mapping[str, str], folder: str | None) -> tuple[str, str | None]:
    """Run a command of a scheduler; return what it said, and what went wrong.

    Args:
        command: the command.
        environ: of the batch script; what belongs to its job is left out.
        folder: where the job was submitted; used if it is there.
    """
    try:
        done = subprocess.run(
            command,
            env=contract.outside_of_jobs(environ),
            cwd=folder if folder and Path(folder).is_dir() else None,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")
        # A site's own may submit a job, tell its id, and hang.
        return said, None if _TOLD_ID.search(said) else f"{command[0]} cannot be run: {error}"
    except OSError as error:
        return "", f"{command[0]} cannot be run: {error}"
    if done.returncode:
        return done.stdout, f"{command[0]}: {_last_line(done.stderr) or f'exit code {done.returncode}'}"
    return done.stdout, None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
