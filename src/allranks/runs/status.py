"""Status of a run: distinct states, with the scheduler's own word for each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple


class State(str, Enum):
    """State of a run or attempt."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    UNKNOWN = "UNKNOWN"

    @property
    def is_final(self) -> bool:
        """Whether the state can no longer change."""
        return self not in (State.PENDING, State.RUNNING, State.UNKNOWN)


class Status(NamedTuple):
    """State of a run.

    Attributes:
        state: the state.
        native: the scheduler's or the agent's own word for it.
        reason: a sentence with the reason, if there is more to say.
        cause: the error of the rank that failed first, in one line.
        exit_code: exit code of a foreground run.
        rank: the first rank that failed.
        started: when the ranks' agent started, in seconds since 1970.
        ended: when it ended.
        restarts: how often the ranks were restarted.
        peak_memory: peak memory in bytes, if a scheduler reports it: of one task on Slurm, of all on PBS.
    """

    state: State
    native: str = ""
    reason: str | None = None
    exit_code: int | None = None
    rank: int | None = None
    started: float | None = None
    ended: float | None = None
    restarts: int = 0
    peak_memory: int | None = None
    cause: str | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds from its start to its end; None if one of them is unknown."""
        return self.ended - self.started if self.ended and self.started else None

    def to_json(self) -> dict[str, Any]:
        """Return the status as plain JSON."""
        return {**self._asdict(), "state": self.state.value}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Status:
        """Read what :meth:`to_json` returned."""
        return cls(**{**raw, "state": State(raw["state"])})


class Handle(NamedTuple):
    """Identifies a started run: its job id on a scheduler, else host, process id and start time."""

    job_id: str | None = None
    host: str | None = None
    pid: int | None = None
    #: Start time of the process as the kernel counts it, which makes the process id unique.
    started: float | None = None
    extra: Mapping[str, Any] = {}


#: Why a run timed out, and what to do.
TIMED_OUT = ("it reached its time limit", "raise resources.time")

#: The native word for a run that was rejected or cancelled before anything had started.
NOT_STARTED = "not started"
