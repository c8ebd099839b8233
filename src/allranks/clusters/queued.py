"""Kinds with a scheduler: a run is a job that is submitted, or what is typed inside an allocation, started at once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters import agents, process
from allranks.clusters.asked import Asked, pauses
from allranks.clusters.base import Look, Looked, Request, Said, Started
from allranks.clusters.child import ChildAgent
from allranks.clusters.job_info import JobInfo
from allranks.clusters.outlook import Outlook
from allranks.clusters.queued_files import current_job, decision_after, has_run_out_of_time, newest
from allranks.clusters.queued_job import SubmittedJob
from allranks.clusters.reason import OUT_OF_TIME
from allranks.clusters.refusals import with_values
from allranks.errors import LaunchError, StartCancelledError
from allranks.job.variables import without_those_of_ranks
from allranks.runs.status import Handle, State, Status

if TYPE_CHECKING:
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run

_CANCEL_SECONDS = 120.0
#: In which a scheduler ends a job whose script has ended.
_ENDS_SECONDS = 15.0
#: In which a script decides about another attempt, before it says so: it asks the scheduler, which may take long.
_DECIDES_SECONDS = 180.0


class QueuedCluster(ABC):
    """What kinds with a scheduler have in common; each says how its own is asked.

    Args:
        clock: monotonic seconds.

    Attributes:
        name: of the kind.
        scheduler: what people call it.
        submit: its command that submits a script.
        allocate: its command that gives a shell in an allocation.
        job_variable: the variable that is set inside an allocation.
        patience: what it gives ranks to leave in, when a job is cancelled.
    """

    name: str
    without: str
    scheduler: str
    submit: str
    allocate: str
    job_variable: str
    patience: str

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._signals: dict[str, int] = {}
        self._asked: dict[tuple[Path, str], Asked] = {}

    @abstractmethod
    def plan(self, request: Request) -> Plan:
        """Decide what will be executed: the batch script, and how it is submitted.

        Raises:
            JobError: the job asks for what cannot be had, or its script is not there.
        """

    @abstractmethod
    def shell_command(
        self, job: Job, words: Sequence[str], environ: Mapping[str, str], *, terminal: bool
    ) -> tuple[str, ...]:
        """Build the command that asks for an allocation and gives a shell on its first node.

        Raises:
            JobError: a directive of the user's own cannot be read.
            PreflightError: this is inside an allocation already.
        """

    @abstractmethod
    def submitted(self, plan: Plan, environ: Mapping[str, str], interrupted: Callable[[], int]) -> str:
        """Submit a plan's script, and return the job's id.

        Raises:
            LaunchError: the scheduler refuses the job, or cannot be reached.
            StartCancelledError: a signal came before the job had an id.
        """

    @abstractmethod
    def foreseen(self, plan: Plan, environ: Mapping[str, str]) -> Outlook:
        """Ask what would become of a plan's script, and submit nothing.

        Raises:
            LaunchError: the scheduler cannot be reached.
        """

    @abstractmethod
    def look_up(self, job_id: str) -> JobInfo | None:
        """Ask what has become of a job; None where the scheduler does not know it any more.

        Raises:
            LaunchError: the scheduler cannot be reached.
        """

    @abstractmethod
    def delete(self, job_id: str) -> None:
        """Cancel a job that waits or runs.

        Raises:
            LaunchError: the scheduler refuses, or cannot be reached.
        """

    def over(self, folder: Path) -> None:  # noqa: B027  Most have nothing to do.
        """Do what is to be done when the run in a folder has ended."""

    @abstractmethod
    def show(self, job_id: str) -> str:
        """Return what a person types to see all that the scheduler knows of a job."""

    @abstractmethod
    def blame(self, status: Status, folder: Path, attempt: Path, job_id: str) -> Status:
        """Tell in the status of a run that has failed what failed first, where no agent could tell."""

    @abstractmethod
    def said(self, run: Run) -> Said:
        """Find what the job's log says that may tell why it ended."""

    def again(self, plan: Plan, attempt: int) -> Plan:
        """Return the plan for another attempt of a run: the script itself takes the next one.

        Raises:
            LaunchError: the allocation that it was started in is not here.
        """
        if plan.commands[0].command[0] != self.submit and not os.environ.get(self.job_variable):
            raise LaunchError(
                f"{plan.run_id} was started inside an allocation, and this shell is in none",
                fix=f"{self.allocate} with as many nodes, and allranks resume there; or allranks run --on a cluster",
            )
        return replace(plan, attempt=attempt)

    def look(self, plan: Plan, look: Look, environ: Mapping[str, str]) -> Sequence[Looked] | None:
        """Return None: there are no nodes yet."""
        return None

    def outlook(self, plan: Plan, environ: Mapping[str, str]) -> Outlook | None:
        """Ask the scheduler what it would do with a plan; None inside an allocation, where it is not asked any more.

        Raises:
            LaunchError: the scheduler cannot be reached.
        """
        if plan.commands[0].command[0] != self.submit:
            return None
        return self.foreseen(plan, _clean(environ))

    def start(self, plan: Plan, environ: Mapping[str, str], *, detach: bool, interrupted: Callable[[], int]) -> Started:
        """Submit the plan's script, or start it where the allocation is there already.

        Raises:
            LaunchError: the scheduler refuses the job, or cannot be reached.
            StartCancelledError: a signal came before the job had an id.
        """
        command = plan.commands[0].command
        if command[0] != self.submit:
            log = Path(plan.run_dir, contract.node_dir(plan.attempt, 0), contract.AGENT_LOG)
            return ChildAgent(
                command, without_those_of_ranks(environ), log, 0o640 if plan.group_readable else 0o600, attached=False
            )
        if number := interrupted():
            raise StartCancelledError(f"{plan.run_id} was cancelled before it was submitted", number)
        try:
            job_id = self.submitted(plan, _clean(environ), interrupted)
        except StartCancelledError:
            raise
        except LaunchError as error:
            raise with_values(error, plan.reasons) from error
        return SubmittedJob(self, Path(plan.run_dir), job_id)

    def status(self, run: Run) -> Status:
        """Find out what has become of a run, from its scheduler and from what its agents told.

        The scheduler is not asked each time: see :meth:`status_of`.
        """
        return self.status_of(run.folder, run.record.handle)

    def status_of(self, folder: Path, handle: Handle) -> Status:
        """Find out what has become of the run in a folder.

        The scheduler is asked the first time, when the run's files show that the job began or ended, and else at
        intervals that grow. In between the answer is the same object as before.
        """
        if handle.job_id is None:
            attempt = newest(folder)
            status = self._inside(attempt, handle, agents.told_by_all(attempt))
            is_blamed = status.state is not State.FAILED or status.rank is not None
            return status if is_blamed else self.blame(status, folder, attempt, "")
        asked = self._asked.setdefault((folder, handle.job_id), Asked(folder))
        if asked.is_due(self._clock()):
            asked.status = self._ask(folder, handle.job_id)
            asked.rest(self._clock())
        return asked.status

    def _ask(self, folder: Path, first_job: str) -> Status:
        """Ask the scheduler; the run may be in another job by now than in its first one."""
        job_id = current_job(folder, first_job)
        try:
            info = self.look_up(job_id)
        except LaunchError as error:
            told = agents.told_by_all(newest(folder))
            return replace(
                told, state=State.UNKNOWN, native=f"{self.scheduler} does not answer", reason=error.why or error.what
            )
        if current_job(folder, first_job) != job_id:
            return self._ask(folder, first_job)  # It has submitted another job meanwhile.
        # Looked at after the scheduler, which may take long to answer: an end is told in them before it knows of it.
        attempt = newest(folder)
        told = agents.told_by_all(attempt)
        is_over = info is None or _has_ended_before(info, told, attempt)
        status = _combined(info, told) if info and not is_over else self._forgotten(attempt, job_id, told)
        if status.state is State.FAILED and status.rank is None:
            status = self.blame(status, folder, attempt, job_id)
        decision = decision_after(attempt)
        if status.state.is_final and decision.get("given_up"):
            status = replace(status, reason=decision["why"])
        if status.state.is_final:
            self.over(folder)
        if status.state is State.CANCELLED and job_id in self._signals:
            return replace(status, exit_code=128 + self._signals[job_id])
        return status

    def bring(self, run: Run) -> None:  # noqa: B027  No kind with a scheduler has to.
        """Do nothing: all that a run writes is in its folder."""

    def cancel(self, run: Run) -> None:
        """End a run, in the queue or running, and wait until the scheduler says that nothing of it is left.

        Raises:
            LaunchError: the scheduler cannot be reached or refuses, or the job does not end.
        """
        handle = run.record.handle
        if handle.job_id is None:
            process.send(handle, signal.SIGTERM)
            if not process.await_end(handle, run.record.stop_timeout + _CANCEL_SECONDS):
                raise LaunchError(
                    f"{run.record.id} does not end", why=f"its script, process {handle.pid}, is still there"
                )
            return
        job_id = current_job(run.folder, handle.job_id)
        self.signal(job_id, signal.SIGTERM)
        deadline = time.monotonic() + _CANCEL_SECONDS
        for pause in pauses():
            info = self.look_up(job_id)
            if info is None or info.state.is_final:
                self.over(run.folder)
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"job {job_id} does not end", why=f"{self.scheduler} says {info.native}", fix=self.show(job_id)
                )
            time.sleep(min(pause, 2.0))

    def signal(self, job_id: str, number: int) -> None:
        """Cancel a job, because of a signal that its launcher got."""
        self._signals[job_id] = number
        self._asked.clear()
        self.delete(job_id)

    def _inside(self, attempt: Path, handle: Handle, told: Status) -> Status:
        """Tell of a run that was started inside an allocation, by a process of that machine."""
        if told.state.is_final or process.is_alive(handle):
            return told
        return self._forgotten(attempt, None, told)

    def _forgotten(self, attempt: Path, job_id: str | None, told: Status) -> Status:
        """Tell of a job that the scheduler does not know any more: by its agents' words, else by its script's."""
        status = self._left_behind(attempt, job_id, told)
        if status.state in (State.CANCELLED, State.UNKNOWN) and has_run_out_of_time(attempt):
            code = status.exit_code or 128 + signal.SIGTERM
            return replace(status, state=State.TIMEOUT, reason=str(OUT_OF_TIME), exit_code=code)
        return status

    def _left_behind(self, attempt: Path, job_id: str | None, told: Status) -> Status:
        """Tell what an attempt itself has left of its end."""
        if told.state.is_final:
            return told
        with contextlib.suppress(OSError, ValueError):
            code = int((attempt / contract.EXIT).read_text())
            words = {0: State.SUCCEEDED, contract.CONTINUE_LATER: State.PREEMPTED}
            words |= {128 + number: State.CANCELLED for number in (signal.SIGINT, signal.SIGTERM)}
            state = words.get(code, State.FAILED)
            return replace(told, state=state, native="ended", reason=None, exit_code=code)
        what = (
            f"{self.scheduler} does not know job {job_id} any more, and"
            if job_id
            else "the process that started it is gone, and"
        )
        return replace(told, state=State.UNKNOWN, native="forgotten", reason=f"{what} nothing tells how it ended")


def _has_ended_before(info: JobInfo, told: Status, attempt: Path) -> bool:
    """Tell whether an attempt was over before its job: the agents and the script then know more than the scheduler.

    PBS keeps a job that has lost a node, and kills it when the node is back: be it that all ranks have succeeded.
    """
    try:
        code = int((attempt / contract.EXIT).read_text())
        ended = (attempt / contract.EXIT).stat().st_mtime
    except (OSError, ValueError):
        return False
    if info.started is None or info.started > ended:
        return False  # The job was put back into the queue, and begins another attempt.
    if info.state is State.RUNNING:
        decision = decision_after(attempt)
        patience = _ENDS_SECONDS if decision or code == 0 else _DECIDES_SECONDS
        return time.time() - ended > patience and not decision.get("again")
    return info.state in (State.FAILED, State.NODE_FAIL) and code == 0 and told.state is State.SUCCEEDED


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a command that submits a job: nothing of a job that it is itself in."""
    return contract.outside_of_jobs(without_those_of_ranks(environ))


def _combined(info: JobInfo, told: Status) -> Status:
    """Combine what the scheduler knows, which decides on the state, with what only agents know: which rank, and why."""
    state, reason, rank = info.state, info.reason, None
    code = told.exit_code if told.state.is_final and told.exit_code is not None else info.exit_code
    if state is State.FAILED:
        reason, rank = told.reason or reason, told.rank
        state = State.PREEMPTED if code == contract.CONTINUE_LATER else state
    if state is State.SUCCEEDED:
        code, reason = 0, told.reason if told.state is State.SUCCEEDED else reason
    elif not code:
        ended_by = info.signal or (signal.SIGTERM if state is State.CANCELLED else None)
        code = 128 + ended_by if ended_by else 1
    return Status(
        state,
        info.native,
        reason=reason,
        exit_code=code if state.is_final else None,
        rank=rank,
        started=told.started or info.started,
        ended=info.ended if state.is_final else None,
        restarts=told.restarts,
        peak_memory=info.peak_memory,
    )
