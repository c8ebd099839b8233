"""What a scheduler says of a job before it is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allranks.errors import LaunchError


@dataclass(frozen=True)
class Objection:
    """What stands against a job.

    Attributes:
        what: what it asks for, and what there is.
        fix: what the user can do.
        is_final: whether it could never start; otherwise it would wait until something changes.
        is_refusal: whether these are the scheduler's own words, with which it refuses the job when it is submitted.
    """

    what: str
    fix: str
    is_final: bool = True
    is_refusal: bool = False


@dataclass(frozen=True)
class Outlook:
    """What becomes of a job that is submitted now, as far as its scheduler tells.

    Attributes:
        where: what would take it: a partition, a queue.
        objections: what stands against it.
        start: when it is expected to start, in seconds since 1970; None where nobody knows.
    """

    where: str
    objections: Sequence[Objection] = ()
    start: float | None = None

    @property
    def is_hopeless(self) -> bool:
        """Whether it would never start."""
        return any(objection.is_final for objection in self.objections)


def objection_of(error: LaunchError) -> Objection:
    """Return a scheduler's refusal as an objection."""
    return Objection(error.in_a_line, error.fix or "change what it asks for", is_refusal=True)
