"""What the core needs to know of a scheduler's job, and of the tasks of an array together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from allranks.runs.status import State


class JobInfo(Protocol):
    """What a scheduler knows of a job. Times are in seconds since 1970, memory in bytes."""

    @property
    def state(self) -> State:
        """Our state."""

    @property
    def native(self) -> str:
        """The scheduler's word for it."""

    @property
    def reason(self) -> str | None:
        """Why it waits or has ended, in a sentence, with what can be done."""

    @property
    def exit_code(self) -> int | None:
        """What the batch script ended with, if it ended by itself."""

    @property
    def signal(self) -> int | None:
        """The signal that ended it, if one did."""

    @property
    def started(self) -> float | None:
        """When it got its nodes; None while it waits."""

    @property
    def ended(self) -> float | None:
        """When it ended; None before."""

    @property
    def peak_memory(self) -> int | None:
        """The most that it, or a task of it, used, where the scheduler tells."""


Info = TypeVar("Info", bound=JobInfo)


def overall(tasks: Iterable[Info]) -> Info | None:
    """Return the task that tells how an array stands: one that runs, else one that waits, else one that failed."""
    order = (State.RUNNING, State.UNKNOWN, State.PENDING)
    ranks = {state: place for place, state in enumerate(order)} | {State.SUCCEEDED: len(State)}
    return min(tasks, key=lambda task: ranks.get(task.state, len(order)), default=None)
