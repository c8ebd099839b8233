"""Requests to a batch scheduler, as directives at the top of a script, or as options of a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from allranks.errors import JobError
from allranks.job.options import TARGETS
from allranks.plan.plan import Reason
from allranks.plan.script import comment

#: A directive in a script.
DIRECTIVE = re.compile(rb"^#(?:SBATCH|PBS|\$)(?=[ \t])", re.MULTILINE)

if TYPE_CHECKING:
    from allranks.job.spec import Job


class Directive(NamedTuple):
    """One request to the scheduler."""

    option: str  # Such as --nodes.
    value: str | None  # None for an option without one.
    why: str  # The job's key, or another reason.
    note: str | None = None  # A comment above the line, if it is not obvious.

    @property
    def reason(self) -> Reason:
        """Its line in the plan."""
        return Reason(self.option, self.value or "", self.why)


def given(*options: tuple[str, object, str, str | None] | tuple[str, object, str]) -> Iterator[Directive]:
    """Yield directives from (option, value, why, note), skipping empty values; True is an option without a value."""
    for option, value, why, *note in options:
        if value:
            yield Directive(option, None if value is True else str(value), why, *note)


def warning_seconds(job: Job) -> int:
    """Return how many seconds before its time limit a job is warned; 0: no warning."""
    requested, limit = int(job.retry.warn_before), job.resources.time
    return requested if limit is None else min(requested, limit // 2)


def mail_letters(job: Job) -> str:
    """Return the events of a job's mail as letters for ``-m`` of PBS and Grid Engine, which have none for a requeue."""
    letters = {"start": "b", "failure": "a", "end": "e"}
    return "".join(letters[event] for event in letters if event in job.notify.on) or "n"


def lines_of(job: Job, prefix: str) -> list[str]:
    """Return the user's directives without ``#SBATCH`` or the like; raise a JobError if one has several lines."""
    lines = [line.strip().removeprefix(prefix).strip() for line in job.scheduler.directives]
    for line in lines:
        if not line.isprintable():
            what, fix = f"scheduler.directives: invalid directive: {line!r}", "write each as an entry of its own"
            raise JobError(what, why="each is one line of text", fix=fix)
    return lines


def with_log_paths(job: Job, folder: Path, *, may_lack: bool) -> Job:
    """Return the job with absolute paths for the scheduler's logs, independent of where it is submitted.

    Paths of the job are relative to ``folder``; ``may_lack``: their directories may be created later.

    Raises:
        JobError: a directory does not exist.
    """
    requested = job.scheduler
    paths = {key: folder / path for key in ("output", "error") if (path := getattr(requested, key))}
    for key, path in paths.items():
        if not (may_lack or "%" in str(path.parent) or path.parent.is_dir()):
            raise JobError(
                f"scheduler.{key}: there is no directory {path.parent}",
                why="nothing could be written there",
                fix=f"mkdir -p {shlex.quote(str(path.parent))}",
            )
    absolute = {key: str(path) for key, path in paths.items()}
    return job.model_copy(update={"scheduler": requested.model_copy(update=absolute)})


def written(directives: Iterable[Directive], prefix: str) -> Iterator[str]:
    """Yield the lines for directives, each after ``prefix``; raise a JobError for a value with several lines."""
    for directive in directives:
        if directive.note:
            yield comment(directive.note)
        yield f"{prefix} {directive.option}{_value(directive)}"


def words_for_shell(job: Job, directives: Iterable[Directive], for_a_script: re.Pattern[str]) -> Iterator[str]:
    """Yield a job's directives as words for the command that opens a shell.

    Options that ``for_a_script`` matches are only for batch scripts; so is the name if the user has given none.

    Raises:
        JobError: a directive of the user cannot be parsed.
    """
    is_named = any(getattr(job, key) for key in ("name", *TARGETS))
    for directive in directives:
        if for_a_script.match(directive.option) or (directive.why == "name" and not is_named):
            continue
        try:
            yield from shlex.split(f"{directive.option}{_value(directive)}", comments=True)
        except ValueError as error:
            what, fix = f"{directive.why}: invalid directive: {directive.option!r}", "close the quotation mark"
            raise JobError(what, why=str(error), fix=fix) from error


def plain_name(name: str, longest: int | None = None) -> str:
    """Return a job's name in characters that each scheduler accepts, starting with a letter."""
    plain = re.sub(r"[^A-Za-z0-9_.+-]", "_", name)
    return (plain if plain[0].isalpha() else f"j{plain}")[:longest]


def _value(directive: Directive) -> str:
    """Quote a value for sbatch and qsub: a backslash escapes the next character, also inside quotes."""
    value = directive.value
    if value is None:
        return ""
    if not value.isprintable():
        what, why = f"{directive.option}={value!r} cannot be asked for", "a directive is one line of text"
        raise JobError(what, why=why, fix=f"write {directive.why} without line breaks and control characters")
    if not re.fullmatch(r"[^\s\"'\\#]+", value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    # An option of one letter takes its value as a separate word.
    return f"{' ' if re.fullmatch('-[A-Za-z]', directive.option) else '='}{value}"
