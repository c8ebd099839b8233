"""A trial whose ranks have told what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from allranks.preflight.trials import Trial
from allranks.runs.record import Run, first_record
from allranks.runs.status import State, Status
from allranks.runs.trial import Told, Who


def who(rank: int, size: int, host: str) -> Who:
    return Who(rank, size, host, rank, 0, "cpu", None, "2.13.0", "gloo")


def trial_of(told: Sequence[Told], *, size: int, state: State = State.SUCCEEDED) -> Trial:
    """Return a trial of a job that asked for ``size`` ranks."""
    record = first_record(
        "test-1",
        name="test",
        cluster="racks",
        kind="ssh",
        world_size=size,
        nnodes=size,
        host="login",
        stop_timeout=30,
        file_mode=0o600,
    )
    run = Run(Path("/runs/test-1"), record)
    object.__setattr__(record, "status", Status(state))
    return Trial(run, size, tuple(sorted(told, key=lambda one: one.rank)))
