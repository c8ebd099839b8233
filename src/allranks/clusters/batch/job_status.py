"""The status of a run from what its scheduler, its agents and its files report, and the logs of its job."""

from __future__ import annotations

import glob
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.runs import attempt as attempts
from allranks.runs.status import State, Status

if TYPE_CHECKING:
    from allranks.clusters.batch.scheduler import JobInfo, Scheduler

#: In which a scheduler ends a job whose script has exited.
_ENDS_SECONDS = 15.0
#: In which a script decides about another attempt, before it says so: it queries the scheduler, which may take long.
_DECIDES_SECONDS = 180.0


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
    return Status(
        state,
        info.native,
        reason=reason,
        exit_code=code if state.is_final else None,
        rank=rank,
        started=reported.started or info.started,
        ended=info.ended if state.is_final else None,
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
    """Name the rank that failed first in a run's status, or give the exit code of its set-up, if no agent has."""
    agents_know = status.rank is not None or any(attempt.glob(f"node-*/{contract.AGENT_EVENTS}"))
    if status.state is not State.FAILED or agents_know:
        return status
    failure = attempts.first_failure(attempt)
    if failure is None and (logs := logs_of(scheduler, folder, job_id)):
        failure = scheduler.failure(attempts.lines_of(logs[0]))
    nodes = attempts.read_json(folder / contract.PLAN_FILE).get("nnodes", 1)
    return failure.blamed(status, attempt, with_host=nodes > 1) if failure else status


def logs_of(scheduler: Scheduler, folder: Path, job_id: str) -> list[Path]:
    """Return the logs of a run's job that have text in them: of its script, and of the scheduler itself."""
    reasons = attempts.read_json(folder / contract.PLAN_FILE).get("reasons", ())
    requested = {reason["subject"]: reason["value"] for reason in reasons}
    patterns = [glob.escape(requested[name]) for name in ("scheduler.error", "scheduler.output") if name in requested]
    patterns += scheduler.logs(glob.escape(str(folder)), job_id, requested)
    return attempts.with_text(patterns)
