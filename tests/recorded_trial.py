"""A trial whose ranks have told what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from allranks.checks.model import Trial
from allranks.record.selftest import RankInfo, SelfTestReport
from allranks.runs.record import Record, Run
from allranks.runs.status import State, Status


def who(rank: int, size: int, host: str) -> RankInfo:
    return RankInfo(rank, size, host, rank, 0, "cpu", None, "2.13.0", "gloo")


def trial_of(told: Sequence[SelfTestReport], *, size: int, state: State = State.SUCCEEDED) -> Trial:
    """Return a trial of a job that asked for ``size`` ranks."""
    record = Record(
        id="test-1",
        name="test",
        cluster="racks",
        kind="ssh",
        world_size=size,
        nnodes=size,
        host="login",
        stop_timeout=30,
        file_mode=0o600,
        created=0.0,
        status=Status(state),
    )
    return Trial(Run(Path("/runs/test-1"), record), size, tuple(sorted(told, key=lambda one: one.rank)))
