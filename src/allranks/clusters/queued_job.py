"""A job that was just submitted, as the command that waits for it sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.happened import Happened
from allranks.clusters.queued_files import current_job, decision_after
from allranks.runs.record import newest_attempt
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
        self._follow(newest_attempt(folder))

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

    @property
    def awaited(self) -> str:
        """What is waited for: the queue, and then ranks that start."""
        if self._status.state is State.PENDING:
            return f"waiting in the queue: {self._status.reason}" if self._status.reason else "waiting in the queue"
        awaited = self._happened.awaited if self._status.state is State.RUNNING else ""
        attempt = self._folder / contract.attempt_dir(self._attempt)
        return awaited if awaited and (attempt / contract.JOB).exists() else ""  # Each task of an array has its own.

    def _look(self) -> None:
        before, self._status = self._status, self._cluster.status_of(self._folder, self.handle)
        self._follow_attempts()
        if self._status is before:
            return  # The scheduler was not asked anew.
        line = _line(before, self._status)
        if line and line != self._told:
            self._told = line
            self._news.append(line)

    def _follow(self, attempt: int) -> None:
        """Follow an attempt from now on."""
        self._attempt, self._is_followed_by_another = attempt, False
        self._happened = Happened(self._folder / contract.node_dir(attempt, 0))

    def _follow_attempts(self) -> None:
        """Note what has happened in the attempt that is followed, and go on to the next when there is one."""
        last = newest_attempt(self._folder)
        while True:
            self._news += self._happened.news()
            self._note_decision(is_over=self._attempt < last)
            if self._attempt == last:
                return
            self._follow(self._attempt + 1)

    def _note_decision(self, *, is_over: bool) -> None:
        """Note once that another attempt follows the one that is followed."""
        decision = decision_after(self._folder / contract.attempt_dir(self._attempt))
        # That a job is put back is written down before it is tried; where that is refused another job may follow.
        is_tried = bool(decision.get("again")) and (is_over or decision.get("how") != "requeue")
        if is_tried and not self._is_followed_by_another:
            self._is_followed_by_another = True
            self._news.append(f"attempt {self._attempt + 1} follows, in job {decision['job']}: {decision['why']}")


def _line(before: Status, now: Status) -> str | None:
    """Say what a state means to a person who waits; a reason that is gone at the next look is not worth a line."""
    if now.state is State.RUNNING:
        return "running"
    if now.state.is_final or not now.reason or (before.state, before.reason) != (now.state, now.reason):
        return None
    return f"{'waiting' if now.state is State.PENDING else now.native}: {now.reason}"
