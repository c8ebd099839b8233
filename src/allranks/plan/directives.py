"""What a batch scheduler is asked for, as lines at the top of a script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from allranks.errors import JobError
from allranks.plan.plan import Reason
from allranks.plan.script import comment


@dataclass(frozen=True)
class Directive:
    """One thing that the scheduler is asked for.

    Attributes:
        option: such as ``--nodes``.
        value: its value; None for an option without one.
        why: the key of the job that asks for it, or another reason.
        note: what a reader of the script is told above the line, where it is not obvious.
    """

    option: str
    value: str | None
    why: str
    note: str | None = None

    @property
    def reason(self) -> Reason:
        """The line of the plan for it."""
        return Reason(self.option, self.value or "", self.why)


def written(directives: Iterable[Directive], prefix: str) -> Iterator[str]:
    """Yield the lines for directives: ``prefix`` is what each begins with, such as ``#SBATCH``.

    Raises:
        JobError: a value has a line break or the like in it.
    """
    for directive in directives:
        if directive.note:
            yield comment(directive.note)
        value = "" if directive.value is None else f"={_quoted(directive)}"
        yield f"{prefix} {directive.option}{value}"


def fits(value: str) -> bool:
    """Tell whether a directive can hold a value: it is one line."""
    return value.isprintable()


def _quoted(directive: Directive) -> str:
    """Quote a value as sbatch and qsub read it: a backslash keeps the next character, within quotes too."""
    value = directive.value or ""
    if not fits(value):
        raise JobError(f"{directive.option}={value!r} cannot be asked for", why="a directive is one line of text")
    if re.fullmatch(r"[^\s\"'\\#]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
