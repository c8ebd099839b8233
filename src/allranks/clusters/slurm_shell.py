"""A shell inside an allocation that Slurm is asked for: as salloc gives it, on the first of its nodes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from allranks.clusters import slurm_directives
from allranks.errors import JobError, PreflightError
from allranks.job.options import TARGETS

if TYPE_CHECKING:
    from allranks.job.spec import Job
    from allranks.plan.directives import Directive

#: What is for a batch script alone: most of it salloc does not know, and nobody is to be written to about a shell.
_FOR_A_SCRIPT = re.compile(
    r"--(array|error|export|export-file|input|mail-\w+|open-mode|output|(no-)?requeue|signal|wait)(?![\w-])|-[aeioW]"
)
#: An interactive step is what Slurm itself starts for a bare salloc where LaunchParameters has use_interactive_step;
#: elsewhere a bare salloc gives a shell where it is typed. Asked for by name it is the same on every site, from Slurm
#: 20.11 on. It runs on the first node, sees the GPUs there, and takes neither them nor CPUs or memory from the steps
#: that are started in it: in a plain step, a further srun without --overlap would wait for ever. The preserved
#: variables are those of the whole allocation: without them a further srun would use the first node alone.
_STEP = ("srun", "--interactive", "--preserve-env")


def shell_command(job: Job, words: Sequence[str], environ: Mapping[str, str], *, terminal: bool) -> tuple[str, ...]:
    """Build the command that asks for an allocation, waits for it, and gives a shell on its first node.

    Args:
        job: the job whose resources are asked for.
        words: what runs there; nothing: the caller's shell. No login shell, as its profile may set another PATH,
            in which the environment that the caller has activated is not.
        environ: the calling environment.
        terminal: whether a person types there.

    Raises:
        JobError: a directive of the user's own cannot be read.
        PreflightError: this is inside an allocation already.
    """
    if inside := environ.get("SLURM_JOB_ID"):
        raise PreflightError(
            f"this is inside an allocation already: SLURM_JOB_ID is {inside}",
            fix="allranks run uses it as it is; for another one, leave this shell first",
        )
    asked = job.launch.nproc_per_node
    nproc = asked if isinstance(asked, int) else job.resources.gpus_per_node or 1
    options = [word for directive in slurm_directives.directives(job, nproc, None) for word in _words(job, directive)]
    pty = ("--pty",) if terminal else ()
    return ("salloc", *options, *_STEP, *pty, *(words or (environ.get("SHELL") or "bash",)))


def _is_named(job: Job) -> bool:
    return any(getattr(job, key) for key in ("name", *TARGETS))


def _words(job: Job, directive: Directive) -> Iterator[str]:
    """Yield the words for a directive, if it is for a shell too; one without any name gets that of salloc."""
    if _FOR_A_SCRIPT.match(directive.option) or (directive.option == "--job-name" and not _is_named(job)):
        return
    if directive.why != slurm_directives.OWN:
        yield directive.option if directive.value is None else f"{directive.option}={directive.value}"
        return
    try:
        yield from shlex.split(directive.option, comments=True)
    except ValueError as error:
        raise JobError(f"{directive.why}: {directive.option!r} is no directive", why=str(error)) from error
