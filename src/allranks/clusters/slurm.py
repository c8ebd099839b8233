"""Slurm: a run is a job, submitted with sbatch, or what is typed inside an allocation, started there at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.clusters import agents, process, slurm_errors, slurm_jobs, slurm_log, slurm_said
from allranks.clusters.base import Request, Said, Started
from allranks.clusters.child import ChildAgent
from allranks.errors import LaunchError
from allranks.job.variables import is_set_for_ranks
from allranks.runs.record import newest_attempt
from allranks.runs.status import Handle, State, Status

if TYPE_CHECKING:
    from allranks.clusters.slurm_jobs import JobInfo
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run

#: Slurm is asked at growing intervals: thousands of people ask the same controller.
_FIRST_SECONDS, _MOST_SECONDS = 0.5, 15.0
_CANCEL_SECONDS = 120.0


class SlurmCluster:
    """The kind ``slurm``.

    Args:
        clock: monotonic seconds.
    """

    name = "slurm"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._signals: dict[str, int] = {}
        self._asked: dict[tuple[Path, str], _Asked] = {}

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed: the batch script, and how it is submitted.

        Raises:
            JobError: the job asks for what Slurm or this kind cannot do, or its script is not there.
        """
        from allranks.clusters.slurm_plan import make_plan  # Not for those who only read what became of a run.

        return make_plan(request)

    def shell_command(
        self, job: Job, words: Sequence[str], environ: Mapping[str, str], *, terminal: bool
    ) -> tuple[str, ...]:
        """Build the command that asks for an allocation and gives a shell on its first node.

        Raises:
            JobError: a directive of the user's own cannot be read.
            PreflightError: this is inside an allocation already.
        """
        from allranks.clusters.slurm_shell import shell_command

        return shell_command(job, words, environ, terminal=terminal)

    def again(self, plan: Plan, attempt: int) -> Plan:
        """Return the plan for another attempt of a run: the script itself takes the next one.

        Raises:
            LaunchError: the allocation that it was started in is not here.
        """
        if plan.commands[0].command[0] != slurm_jobs.SUBMIT and not os.environ.get("SLURM_JOB_ID"):
            raise LaunchError(
                f"{plan.run_id} was started inside an allocation, and this shell is in none",
                fix="salloc with as many nodes, and allranks resume there; or allranks run --on a cluster",
            )
        return replace(plan, attempt=attempt)

    def start(self, plan: Plan, environ: Mapping[str, str], *, detach: bool, interrupted: Callable[[], int]) -> Started:
        """Submit the plan's script, or start it where the allocation is there already.

        Raises:
            LaunchError: Slurm refuses the job, or cannot be reached.
        """
        command = plan.commands[0].command
        clean = {name: value for name, value in environ.items() if not is_set_for_ranks(name)}
        if command[0] != slurm_jobs.SUBMIT:
            log = Path(plan.run_dir, contract.node_dir(plan.attempt, 0), contract.AGENT_LOG)
            return ChildAgent(command, clean, log, 0o640 if plan.group_readable else 0o600, attached=False)
        try:
            answer = slurm_jobs.ask(command, contract.outside_of_slurm_jobs(clean), cwd=plan.workdir)
        except LaunchError as error:
            raise slurm_errors.with_values(error, plan.reasons) from error
        return SubmittedJob(self, Path(plan.run_dir), slurm_jobs.parse_submitted(answer))

    def status(self, run: Run) -> Status:
        """Find out what has become of a run, from Slurm and from what its agents told.

        Slurm is not asked each time: see :meth:`status_of`.
        """
        return self.status_of(run.folder, run.record.handle)

    def status_of(self, folder: Path, handle: Handle) -> Status:
        """Find out what has become of the run in a folder.

        Slurm is asked the first time, when the run's files show that the job began or ended, and else at intervals
        that grow. In between the answer is the same object as before.
        """
        if handle.job_id is None:
            attempt = _newest(folder)
            return self._inside(attempt, handle, agents.told_by_all(attempt))
        asked = self._asked.setdefault((folder, handle.job_id), _Asked(folder))
        if asked.is_due(self._clock()):
            asked.status = self._ask(folder, handle.job_id)
            asked.rest(self._clock())
        return asked.status

    def _ask(self, folder: Path, first_job: str) -> Status:
        """Ask Slurm; the run may be in another job by now than in its first one."""
        job_id = current_job(folder, first_job)
        try:
            info = slurm_jobs.look_up(job_id)
        except LaunchError as error:
            told = agents.told_by_all(_newest(folder))
            return replace(told, state=State.UNKNOWN, native="Slurm does not answer", reason=error.why or error.what)
        if current_job(folder, first_job) != job_id:
            return self._ask(folder, first_job)  # It has submitted another job meanwhile.
        # Looked at after Slurm, which may take long to answer: an end is told in them before Slurm knows of it.
        attempt = _newest(folder)
        told = agents.told_by_all(attempt)
        status = _combined(info, told) if info else _forgotten(attempt, job_id, told)
        if info and status.state is State.FAILED and status.rank is None:
            status = slurm_log.blame(status, folder, attempt, job_id)
        decision = _decision(attempt)
        if status.state.is_final and decision.get("given_up"):
            status = replace(status, reason=decision["why"])
        if status.state is State.CANCELLED and job_id in self._signals:
            return replace(status, exit_code=128 + self._signals[job_id])
        return status

    def bring(self, run: Run) -> None:
        """Do nothing: all that a run writes is in its folder."""

    def cancel(self, run: Run) -> None:
        """End a run, in the queue or running, and wait until Slurm says that nothing of it is left.

        Raises:
            LaunchError: Slurm cannot be reached or refuses, or the job does not end.
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
        for pause in _pauses():
            info = slurm_jobs.look_up(job_id)
            if info is None or info.state.is_final:
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"job {job_id} does not end", why=f"Slurm says {info.native}", fix=f"scontrol show job {job_id}"
                )
            time.sleep(min(pause, 2.0))

    def said(self, run: Run) -> Said:
        """Find what the job's log says that may tell why it ended."""
        log = slurm_said.log_of(run)
        return Said(log, slurm_said.causes(log) if log else ())

    def signal(self, job_id: str, number: int) -> None:
        """Cancel a job, because of a signal that its launcher got."""
        self._signals[job_id] = number
        self._asked.clear()
        slurm_jobs.ask(slurm_jobs.cancel_command(job_id), os.environ)

    def _inside(self, attempt: Path, handle: Handle, told: Status) -> Status:
        """Tell of a run that was started inside an allocation, by a process of that machine."""
        if told.state.is_final or process.is_alive(handle):
            return told
        return _forgotten(attempt, None, told)


class SubmittedJob:
    """A job that was just submitted. Waiting for it is asking Slurm, now and then, and looking at the run's files."""

    outlives = False

    def __init__(self, cluster: SlurmCluster, folder: Path, job_id: str) -> None:
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
        self._news.append("Slurm gives its ranks the site's KillWait to leave (30 s, unless changed)")
        self._cluster.signal(current_job(self._folder, str(self.handle.job_id)), number)

    def news(self) -> Sequence[str]:
        """Tell of changes of the job's state, and why it waits."""
        told, self._news = self._news, []
        return told

    def _look(self) -> None:
        before, self._status = self._status, self._cluster.status_of(self._folder, self.handle)
        if self._status is before:
            return  # Slurm was not asked anew.
        line = _line(before, self._status)
        if line and line != self._told:
            self._told = line
            self._news.append(line)


class _Asked:
    """What Slurm was asked about a run, and when it is to be asked again."""

    status = Status(State.UNKNOWN)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: object = None
        self._pauses = _pauses()
        self._next = 0.0

    def is_due(self, now: float) -> bool:
        """Tell whether it is time, or the run's files have changed."""
        attempt = _newest(self._folder)
        files = attempt, (attempt / contract.JOB).exists(), (attempt / contract.EXIT).exists()
        if files != self._files:
            self._files, self._pauses = files, _pauses()
            return True
        return now >= self._next

    def rest(self, now: float) -> None:
        """Let some time pass before the next question, more each time."""
        self._next = now + next(self._pauses)


def _line(before: Status, now: Status) -> str | None:
    """Say what a state means to a person who waits; a reason that is gone at the next look is not worth a line."""
    if now.state is State.RUNNING:
        return "running"
    if now.state.is_final or not now.reason or (before.state, before.reason) != (now.state, now.reason):
        return None
    return f"{'waiting' if now.state is State.PENDING else now.native}: {now.reason}"


def _newest(folder: Path) -> Path:
    """Return the folder of a run's newest attempt."""
    return folder / contract.attempt_dir(newest_attempt(folder))


def current_job(folder: Path, first: str) -> str:
    """Return the id of the job that a run is now: of its newest attempt, or of the one that was queued after it.

    Args:
        folder: the run's.
        first: the job that was submitted, with its cluster if Slurm told one: a job itself does not know that.
    """
    attempt = _newest(folder)
    found = str(_decision(attempt).get("job") or "")
    with contextlib.suppress(OSError):
        found = found or (attempt / contract.JOB).read_text().strip()
    _, separator, cluster = first.partition(";")
    return f"{found}{separator}{cluster}" if found else first


def _decision(attempt: Path) -> dict[str, Any]:
    """Return what was decided at the end of an attempt; nothing where nothing was."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((attempt / contract.AGAIN).read_text()))
    return {}


def _combined(info: JobInfo, told: Status) -> Status:
    """Combine what Slurm knows, which decides on the state, with what only the agents know: which rank, and why."""
    state, reason, rank = info.state, info.reason, None
    code = told.exit_code if told.state.is_final and told.exit_code is not None else info.exit_code
    if state is State.FAILED:
        reason, rank = told.reason or reason, told.rank
        state = State.PREEMPTED if code == contract.CONTINUE_LATER else state
    if state is State.SUCCEEDED:
        code = 0
    elif not code:
        code = 128 + info.signal if info.signal else 1
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


def _forgotten(attempt: Path, job_id: str | None, told: Status) -> Status:
    """Tell of a job that Slurm does not know any more: by its agents' words, else by its script's."""
    if told.state.is_final:
        return told
    with contextlib.suppress(OSError, ValueError):
        code = int((attempt / contract.EXIT).read_text())
        words = {0: State.SUCCEEDED, contract.CONTINUE_LATER: State.PREEMPTED}
        state = words.get(code, State.FAILED)
        return replace(told, state=state, native="ended", reason=None, exit_code=code)
    what = f"Slurm does not know job {job_id} any more, and" if job_id else "the process that started it is gone, and"
    return replace(told, state=State.UNKNOWN, native="forgotten", reason=f"{what} nothing tells how it ended")


def _pauses() -> Iterator[float]:
    """Yield the seconds between two questions to Slurm."""
    pause = _FIRST_SECONDS
    while True:
        yield pause
        pause = min(_MOST_SECONDS, pause * 1.5)
