"""The line that a person pastes on a node to start its ranks with torch's own launcher, and nothing of ours."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.errors import JobError
from allranks.plan import environment, plain_launcher
from allranks.plan.entry import find_entry
from allranks.plan.plain_launcher import Place
from allranks.plan.resolve import environment_of, python_of, workdir_of
from allranks.plan.script import conda_lines, enter, venv_lines

if TYPE_CHECKING:
    from allranks.job.spec import Environment, Job

#: What a line of a user's may not hold to be one part of a longer one: a comment, a text of its own, an open end.
_OPEN_ENDS = ("\\", "&", ";", "|", "(", "{")


def plain_line(job: Job, folder: Path, place: Place) -> str:
    """Return the line for a node. It leaves folder and variables of the shell that it is pasted into as they are.

    Args:
        job: the job.
        folder: absolute folder that relative paths of the job are relative to.
        place: the node's.

    Raises:
        JobError: what the job runs is not there, or its set-up fits on no line.
    """
    workdir, python = workdir_of(job, folder), python_of(job, {})
    entry = find_entry(job, workdir, same_python=False)
    chosen = environment_of(job, folder)
    given = [f"{reason.subject}={shlex.quote(reason.value)}" for reason in environment.settings(job, None, {})]
    parts = [
        enter(str(workdir)),
        *_set_up(chosen),
        *([" ".join(["export", *given])] if given else []),
        *(f'export {name}="${{{name}?set it before}}"' for name in environment.secrets(job)),
        " ".join(plain_launcher.command(job.model_copy(update={"environment": chosen}), python, entry, place)),
    ]
    return f"({' && '.join(parts)})"


def _set_up(chosen: Environment) -> Iterator[str]:
    yield from _on_one_line("environment.setup", chosen.setup)
    if chosen.modules:
        yield "module load " + shlex.join(chosen.modules)
    yield from conda_lines(chosen.conda)
    yield from venv_lines(chosen.venv)
    yield from _on_one_line("environment.node_setup", chosen.node_setup)


def _on_one_line(key: str, lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if "#" in line or "<<" in line or line.rstrip().endswith(_OPEN_ENDS) or not _is_whole(line):
            why = f"it would have to be a part of a longer line: {line.strip()}"
            raise JobError(f"{key} fits on no line", why=why, fix="put it into a file: '. ./setup.sh'")
        if line.strip():
            yield f"{{ {line.strip()}; }}"


def _is_whole(line: str) -> bool:
    try:
        shlex.split(line)
    except ValueError:  # A quotation mark is open.
        return False
    return True
