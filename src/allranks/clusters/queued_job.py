"""A job that was just submitted, as the command that waits for it sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.clusters.queued_files import current_job
from allranks.runs.status import Handle, State, Status

if TYPE_CHECKING:
    from allranks.clusters.queued import QueuedCluster


class SubmittedJob:
    """A job that was just submitted. Waiting is asking its scheduler, now and then, and looking at the run's files."""

    outlives = False

    def __init__(self, cluster: QueuedCluster, folder: Path, job_id: str) -> None:
        self.handle = Handle(job_id=job_id)
        self._cluster, self._folder = cluster, folder
        self._status = Status(State.PENDING, "submitted")
        self._news: list[str] = [f"job {job_id} submitted"]
        self._told: str | None = None

    def wait(self, seconds: float) -> bool:
        """Wait so long, unless the run has ended; tell whether it has."""
        if self._status.state.is_final:
            return True
        if seconds:
            time.sleep(seconds)
        self._look()
        return self._status.state.is_final

    def signal(self, number: int) -> None:
        """Cancel the job."""
        self._news.append(f"{self._cluster.scheduler} gives its ranks {self._cluster.patience}")
        self._cluster.signal(current_job(self._folder, str(self.handle.job_id)), number)

    def news(self) -> Sequence[str]:
        """Tell of changes of the job's state, and why it waits."""
        told, self._news = self._news, []
        return told

    def _look(self) -> None:
        before, self._status = self._status, self._cluster.status_of(self._folder, self.handle)
        if self._status is before:
            return  # The scheduler was not asked anew.
        line = _line(before, self._status)
        if line and line != self._told:
            self._told = line
            self._news.append(line)


def _line(before: Status, now: Status) -> str | None:
    """Say what a state means to a person who waits; a reason that is gone at the next look is not worth a line."""
    if now.state is State.RUNNING:
        return "running"
    if now.state.is_final or not now.reason or (before.state, before.reason) != (now.state, now.reason):
        return None
    return f"{'waiting' if now.state is State.PENDING else now.native}: {now.reason}"
