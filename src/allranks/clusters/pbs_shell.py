"""A shell inside an allocation that PBS is asked for: as qsub -I gives it, on the first of its nodes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.clusters import pbs_directives, pbs_jobs
from allranks.errors import JobError, PreflightError
from allranks.job.options import TARGETS

if TYPE_CHECKING:
    from allranks.job.spec import Job
    from allranks.plan.directives import Directive

#: What is for a batch script alone, and nobody is to be written to about a shell.
_FOR_A_SCRIPT = re.compile(r"-[ejkJmMorRSt](?![A-Za-z])")
#: PBS starts a shell in the home folder, with the PATH of a login: this goes to where the command was typed.
_HERE = 'cd -- "$0" && export PATH="$1" && shift && exec "$@"'


def shell_command(job: Job, words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Build the command that asks for an allocation, waits for it, and gives a shell on its first node.

    Args:
        job: the job whose resources are asked for.
        words: what runs there; nothing: the caller's shell.
        environ: the calling environment.

    Raises:
        JobError: a directive of the user's own cannot be read, or this PBS runs no command there.
        PreflightError: this is inside an allocation already.
    """
    if inside := environ.get("PBS_JOBID"):
        raise PreflightError(
            f"this is inside an allocation already: PBS_JOBID is {inside}",
            fix="allranks run uses it as it is; for another one, leave this shell first",
        )
    flavour = pbs_jobs.flavour_for(job, environ)
    asked = job.launch.nproc_per_node
    nproc = asked if isinstance(asked, int) else job.resources.gpus_per_node or 1
    made = pbs_directives.directives(job, nproc, None, flavour)
    command = ("qsub", "-I", *(word for directive in made for word in _words(job, directive)))
    if flavour == "openpbs":
        shell = words or (environ.get("SHELL") or "bash",)
        return (*command, "--", "/bin/bash", "-c", _HERE, str(Path.cwd()), environ.get("PATH", ""), *shell)
    if words:
        raise JobError("Torque's qsub -I runs no command", fix="allranks shell without one, and type it there")
    return command


def _words(job: Job, directive: Directive) -> Iterator[str]:
    """Yield the words for a directive, if it is for a shell too; one without any name gets that of qsub."""
    is_named = any(getattr(job, key) for key in ("name", *TARGETS))
    if _FOR_A_SCRIPT.match(directive.option) or (directive.option == "-N" and not is_named):
        return
    try:
        words = shlex.split(directive.option, comments=True)
    except ValueError as error:
        raise JobError(f"{directive.why}: {directive.option!r} is no directive", why=str(error)) from error
    option, *value = words
    yield option
    if directive.value is not None:
        yield "=".join([*value, directive.value])
    else:
        yield from value
