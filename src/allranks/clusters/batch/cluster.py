"""Kinds with a scheduler: a run is a job that is submitted, or what is typed inside an allocation, started at once."""

from __future__ import annotations

import glob
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.base import ClusterKind, Feasibility, Request, Started
from allranks.clusters.local_agent import ChildAgent, await_end, is_alive, send
from allranks.errors import LaunchError, PreflightError, StartCancelledError
from allranks.job.variables import for_another_job, without_those_of_ranks
from allranks.logs.cause import LogExcerpt
from allranks.record.files import write_atomically
from allranks.runs import agents, excerpts
from allranks.runs import attempt as attempts
from allranks.runs.status import Handle, State, Status

if TYPE_CHECKING:
    from allranks.clusters.batch.scheduler import JobInfo, Scheduler
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run

_CANCEL_SECONDS = 120.0
#: A scheduler is queried at growing intervals: thousands of people query the same server.
_FIRST_SECONDS, _MOST_SECONDS = 0.5, contract.scaled_wait(15.0)
#: In which a scheduler ends a job whose script has exited; in which a script decides, by queries, to go on in another.
_ENDS_SECONDS, _DECIDES_SECONDS = 15.0, 180.0


class BatchCluster(ClusterKind):
    """A kind of cluster with a scheduler; ``clock`` gives monotonic seconds."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self.scheduler, self.name, self.without = scheduler, scheduler.name, scheduler.without
        self._clock = clock
        self._signals: dict[str, int] = {}
        #: Of a run's job: its status at the last query, which files were there, when the next is due, the pause after.
        self._polls: dict[tuple[Path, str], tuple[Status, tuple[Path, bool, bool], float, float]] = {}

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed: the batch script, and how it is submitted."""
        from allranks.clusters.batch.plan import Draft  # Not for those who only read the state of a run.

        return Draft(self.scheduler, request).plan()

    def shell_command(
        self, job: Job, words: Sequence[str], environ: Mapping[str, str], *, terminal: bool
    ) -> tuple[str, ...]:
        """Build the command that gives a shell on the first node of an allocation, or runs ``words`` there."""
        variables = self.scheduler.environment
        if inside := variables.job(environ):
            raise PreflightError(
                f"this is inside an allocation already: {variables.job_id} is {inside}",
                fix="allranks run uses it as it is; for another one, leave this shell first",
            )
        requested = job.launch.nproc_per_node
        nproc = requested if isinstance(requested, int) else job.resources.gpus_per_node or 1
        return self.scheduler.shell(job, nproc, words, environ, terminal)

    def reach(self, environ: Mapping[str, str]) -> None:
        """Raise a LaunchError if the scheduler's commands are not here, or do not reach it."""
        command = shlex.split(os.path.expandvars(self.scheduler.list_jobs))
        answer = self.scheduler.run(command, environ)
        if self.scheduler.is_away(answer):
            raise self.scheduler.refusal(command, answer.code, answer.out + answer.err)

    def again(self, plan: Plan, attempt: int) -> Plan:
        """Return the plan for another attempt of a run: the script itself takes the next one."""
        if not self._is_submitted(plan) and not self.scheduler.environment.job(os.environ):
            what = f"{plan.run_id} was started inside an allocation, and this shell is in none"
            there = f"{self.scheduler.allocate.format(plan.nnodes)}, and allranks resume there"
            raise LaunchError(what, fix=f"{there}; or allranks run --on a cluster")
        return replace(plan, attempt=attempt)

    def feasibility(self, plan: Plan, environ: Mapping[str, str]) -> Feasibility | None:
        """Query what the scheduler would do with a plan; None inside an allocation."""
        return self.scheduler.feasibility(plan, for_another_job(environ)) if self._is_submitted(plan) else None

    def _is_submitted(self, plan: Plan) -> bool:
        return plan.commands[0].command[0] == self.scheduler.submit

    def start(self, plan: Plan, environ: Mapping[str, str], *, detach: bool, interrupted: Callable[[], int]) -> Started:
        """Submit the plan's script, unless a signal comes before the job has an id; inside an allocation start it."""
        if not self._is_submitted(plan):
            log = Path(plan.run_dir, contract.node_dir(plan.attempt, 0), contract.AGENT_LOG)
            marked = without_those_of_ranks(environ)
            return ChildAgent(plan.commands[0].command, marked, log, plan.file_mode, attached=False)
        if number := interrupted():
            raise StartCancelledError(f"{plan.run_id} was cancelled before it was submitted", number)
        clean = for_another_job(environ)
        if plan.secrets and not self.scheduler.passes_environment:
            from allranks.plan.script import exports

            # Not in the submit command: every user may read that in the scheduler's answers.
            write_atomically(Path(plan.run_dir, contract.SECRETS_FILE), exports(plan.secrets, clean), 0o600)
        return SubmittedJob(self, Path(plan.run_dir), self.scheduler.submit_plan(plan, clean, interrupted))

    def status(self, run: Run) -> Status:
        """Return the status of a run: see :meth:`status_of`."""
        return self.status_of(run.folder, run.record.handle)

    def status_of(self, folder: Path, handle: Handle) -> Status:
        """Return the status of the run in a directory, from its scheduler and from its agents.

        The scheduler is queried the first time, when the run's files show that the job started or ended, and else at
        intervals that grow. In between the answer is the same object as before.
        """
        if handle.job_id is None:
            attempt = attempts.newest(folder)
            status = agents.reported_by_all(attempt)
            if not (status.state.is_final or is_alive(handle)):
                status = attempts.forgotten(attempt, status, "the process that started it is gone", has_started=True)
            return blame(self.scheduler, status, folder, attempt, "")
        key, attempt, pause = (folder, handle.job_id), attempts.newest(folder), _FIRST_SECONDS
        seen = (attempt, (attempt / contract.JOB).exists(), (attempt / contract.EXIT).exists())
        if (last := self._polls.get(key)) and last[1] == seen:
            status, _, due, pause = last
            if self._clock() < due:
                return status
        status = self._query(*key)
        self._polls[key] = (status, seen, self._clock() + pause, min(_MOST_SECONDS, pause * 1.5))
        return status

    def _query(self, folder: Path, first_job: str) -> Status:
        """Query the scheduler; the run may be in another job by now than in its first one."""
        title, job_id = self.scheduler.title, attempts.current_job(folder, first_job)
        try:
            info = self.scheduler.query_job(job_id)
        except LaunchError as error:
            reported, native = agents.reported_by_all(attempts.newest(folder)), f"{title} does not answer"
            return reported._replace(state=State.UNKNOWN, native=native, reason=error.why or error.what)
        if attempts.current_job(folder, first_job) != job_id:
            return self._query(folder, first_job)  # It has submitted another job meanwhile.
        # Read after the scheduler has answered, which may take long: agents record an end before it knows of it.
        attempt = attempts.newest(folder)
        reported = agents.reported_by_all(attempt)
        if info and not has_ended_before(info, reported, attempt):
            status = combined(info, reported)
        else:
            # A log elsewhere, of the user's own, may have the text of other runs.
            has_log = any(folder in log.parents for log in logs_of(self.scheduler, folder, job_id))
            why = f"{title} has no record of job {job_id}"
            status = attempts.forgotten(attempt, reported, why, has_started=has_log)
        status = blame(self.scheduler, status, folder, attempt, job_id)
        if status.state.is_final:
            decision = attempts.decision_after(attempt)
            status = status._replace(reason=decision["why"]) if decision.get("given_up") else status
            attempts.remove_secrets(folder)
        if status.state is State.CANCELLED and job_id in self._signals:
            return status._replace(exit_code=128 + self._signals[job_id])
        return status

    def cancel(self, run: Run) -> None:
        """End a run, in the queue or running, and wait until the scheduler reports that nothing of it is left."""
        handle = run.record.handle
        if handle.job_id is None:
            send(handle, signal.SIGTERM)
            if not await_end(handle, run.record.stop_timeout + _CANCEL_SECONDS):
                why = f"its script, process {handle.pid}, is still there"
                raise LaunchError(f"{run.record.id} does not end", why=why, fix=f"kill -9 {handle.pid}")
            return
        job_id = attempts.current_job(run.folder, handle.job_id)
        self.signal(job_id, signal.SIGTERM)
        deadline, pause = time.monotonic() + _CANCEL_SECONDS, _FIRST_SECONDS
        while (info := self.scheduler.query_job(job_id)) and not info.state.is_final:
            if time.monotonic() > deadline:
                why, fix = f"{self.scheduler.title} says {info.native}", shlex.join(self.scheduler.show(job_id))
                raise LaunchError(f"job {job_id} does not end", why=why, fix=fix)
            time.sleep(pause)
            pause = min(2.0, pause * 1.5)
        attempts.remove_secrets(run.folder)

    def signal(self, job_id: str, number: int) -> None:
        """Cancel a job, because of a signal that its launcher got; a job that already ended is ignored."""
        self._signals[job_id] = number
        self._polls.clear()
        self.scheduler.output(self.scheduler.cancel(job_id), os.environ, gone=self.scheduler.gone)

    def log_excerpt(self, run: Run) -> LogExcerpt:
        """Find what may tell why a run's newest attempt ended: what a set-up that failed has said, else any log."""
        logs = logs_to_search(self.scheduler, run.folder, run.attempt_folder, run.job_id or "")
        failed = excerpts.setup_failure(logs, run.folder, self.scheduler.log_noise)
        return failed[1] if failed else excerpts.excerpt(logs, self.scheduler.log_noise)


class SubmittedJob:
    """A job that was just submitted. Waiting is querying its scheduler, now and then, and reading the run's files."""

    outlives = False

    def __init__(self, cluster: BatchCluster, folder: Path, job_id: str) -> None:
        self.handle = Handle(job_id=job_id)
        self._cluster, self._folder = cluster, folder
        self._status = Status(State.PENDING, "submitted")
        self._news, self._reported = [f"job {job_id} submitted"], ""
        self._happened = agents.HappenedInJobs(folder)

    def wait(self, seconds: float) -> bool:
        """Wait so long, unless the run has ended; return whether it has."""
        before = self._status
        if before.state.is_final:
            return True
        time.sleep(seconds)
        now = self._status = self._cluster.status_of(self._folder, self.handle)
        self._news += self._happened.news()
        line = ""
        if now.state is State.RUNNING:
            line = "running"
        elif not now.state.is_final and now is not before and (before.state, before.reason) == (now.state, now.reason):
            word = "waiting" if now.state is State.PENDING else now.native
            line = f"{word}: {now.reason}" if now.reason else ""  # One that is gone at the next query is not worth it.
        if line and line != self._reported:
            self._reported = line
            self._news.append(line)
        return now.state.is_final

    def signal(self, number: int) -> None:
        """Cancel the job."""
        self._news.append(f"{self._cluster.scheduler.title} gives its ranks {self._cluster.scheduler.patience}")
        self._cluster.signal(attempts.current_job(self._folder, str(self.handle.job_id)), number)

    def news(self) -> Sequence[str]:
        """Return changes of the job's state, and why it waits."""
        reported, self._news = self._news, []
        return reported

    @property
    def awaited(self) -> str:
        """What is waited for: the queue, and then ranks that start."""
        if self._status.state is State.PENDING:
            return f"waiting in the queue: {self._status.reason}" if self._status.reason else "waiting in the queue"
        return self._happened.awaited if self._status.state is State.RUNNING else ""


def combined(info: JobInfo, reported: Status) -> Status:
    """Combine what the scheduler knows, which decides on the state, with what only agents know: which rank, and why."""
    state, reason, rank = info.state, info.reason, None
    code = reported.exit_code if reported.state.is_final and reported.exit_code is not None else info.exit_code
    if state is State.FAILED:
        reason, rank = reported.reason or reason, reported.rank
        state = State.PREEMPTED if code == contract.CONTINUE_LATER else state
    if state is State.SUCCEEDED:
        code, reason = 0, reported.reason if reported.state is State.SUCCEEDED else reason
    elif not code:
        ended_by = info.signal or (signal.SIGTERM if state is State.CANCELLED else None)
        code = 128 + ended_by if ended_by else 1
    # A scheduler has whole seconds, and would have a short run end before its agents have seen it start.
    ended = max(filter(None, (info.ended, reported.ended)), default=None)
    return Status(
        state,
        info.native,
        reason=reason,
        exit_code=code if state.is_final else None,
        rank=rank,
        started=reported.started or info.started,
        ended=ended if state.is_final else None,
        restarts=reported.restarts,
        peak_memory=info.peak_memory,
    )


def has_ended_before(info: JobInfo, reported: Status, attempt: Path) -> bool:
    """Return whether an attempt ended before its job: the agents and the script then know more than the scheduler.

    PBS keeps a job that has lost a node, and kills it when the node is back, even if all ranks have succeeded.
    """
    ended = attempts.exit_of(attempt)
    if ended is None or info.started is None or info.started > ended[1]:
        return False  # The script runs, or the job was put back into the queue for another attempt.
    if info.state is State.RUNNING:
        decision = attempts.decision_after(attempt)
        patience = _ENDS_SECONDS if decision or ended[0] == 0 else _DECIDES_SECONDS
        return time.time() - ended[1] > patience and not decision.get("again")
    return info.state in (State.FAILED, State.NODE_FAIL) and ended[0] == 0 and reported.state is State.SUCCEEDED


def blame(scheduler: Scheduler, status: Status, folder: Path, attempt: Path, job_id: str) -> Status:
    """Name in a run's status the line of its set-up that failed or, if no agent has, the rank that failed first."""
    if status.state is not State.FAILED or status.rank is not None:
        return status
    if found := excerpts.setup_failure(logs_to_search(scheduler, folder, attempt, job_id), folder, scheduler.log_noise):
        failed, excerpt = found
        cause = next(iter(excerpt.causes), None)
        return status._replace(reason=failed.what, exit_code=failed.code, cause=cause)
    if any(attempt.glob(f"node-*/{contract.AGENT_EVENTS}")):
        return status  # Agents know more.
    failure = attempts.first_failure(attempt)
    if failure is None and (logs := logs_of(scheduler, folder, job_id)):
        failure = scheduler.failure(excerpts.lines_of(logs[0]))
    nodes = attempts.read_json(folder / contract.PLAN_FILE).get("nnodes", 1)
    return failure.blamed(status, attempt, with_host=nodes > 1) if failure else status


def logs_of(scheduler: Scheduler, folder: Path, job_id: str) -> list[Path]:
    """Return the logs of a run's job that have text in them: of its script, and of the scheduler itself."""
    reasons = attempts.read_json(folder / contract.PLAN_FILE).get("reasons", ())
    requested = {reason["subject"]: reason["value"] for reason in reasons}
    patterns = [glob.escape(requested[name]) for name in ("scheduler.error", "scheduler.output") if name in requested]
    patterns += scheduler.logs(glob.escape(str(folder)), job_id, requested)
    return excerpts.with_text(patterns)


def logs_to_search(scheduler: Scheduler, folder: Path, attempt: Path, job_id: str) -> list[Path]:
    """Return the logs of an attempt's job, of the node that failed first, and of the first node."""
    logs = logs_of(scheduler, folder, job_id)
    if first := attempts.first_failure(attempt):
        logs.append(first.folder / contract.AGENT_LOG)
    if log := excerpts.agent_excerpt(attempt / Path(contract.node_dir(0, 0)).name).log:
        logs.append(log)
    return logs
