"""The status of a run from what its scheduler, its agents and its files report, and the logs of its job."""

from __future__ import annotations

import contextlib
import glob
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.batch.scheduler import OUT_OF_TIME
from allranks.logs.cause import find_cause
from allranks.runs import agents
from allranks.runs.agents import SetupFailure
from allranks.runs.attempt import decision_after, exit_of, first_failure, lines_of, read_json
from allranks.runs.status import LogExcerpt, State, Status

if TYPE_CHECKING:
    from allranks.clusters.batch.scheduler import JobInfo, Scheduler
    from allranks.runs.record import Run

#: Tells no cause in any log: what bash prints of a signal, and what agents and the supervisor print besides.
_NOISE = re.compile(r"Terminated$|(?:allranks: )?(?:node \d+: )?[A-Z_]+=\S*: |allranks: (?:an|no )other attempt")
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
    ended = exit_of(attempt)
    if ended is None or info.started is None or info.started > ended[1]:
        return False  # The script runs, or the job was put back into the queue for another attempt.
    if info.state is State.RUNNING:
        decision = decision_after(attempt)
        patience = _ENDS_SECONDS if decision or ended[0] == 0 else _DECIDES_SECONDS
        return time.time() - ended[1] > patience and not decision.get("again")
    return info.state in (State.FAILED, State.NODE_FAIL) and ended[0] == 0 and reported.state is State.SUCCEEDED


def forgotten(attempt: Path, reported: Status, why: str, *, has_started: bool) -> Status:
    """Return the status of a job that the scheduler does not know: as its agents report it, else as its script does.

    ``has_started`` is whether its script started. Of one that failed before the supervisor there may be only a log.
    """
    status = reported
    if not reported.state.is_final:
        if ended := exit_of(attempt):
            states = {0: State.SUCCEEDED, contract.CONTINUE_LATER: State.PREEMPTED}
            states |= {128 + number: State.CANCELLED for number in (signal.SIGINT, signal.SIGTERM)}
            state = states.get(ended[0], State.FAILED)
            status = replace(reported, state=state, native="ended", reason=None, exit_code=ended[0])
        elif not has_started:
            # Some schedulers keep no record of a job that was deleted before it started.
            reason, code = "it was deleted before it started", 128 + signal.SIGTERM
            status = replace(reported, state=State.CANCELLED, native="deleted", reason=reason, exit_code=code)
        else:
            reason = f"{why}: its final state is unknown"
            status = replace(reported, state=State.UNKNOWN, native="forgotten", reason=reason)
    if status.state in (State.CANCELLED, State.UNKNOWN):
        with contextlib.suppress(OSError, ValueError):
            terminated = attempt / contract.TERMINATED  # When its script was terminated, and in it, when the limit is.
            if terminated.stat().st_mtime >= int(terminated.read_text()):
                code = status.exit_code or 128 + signal.SIGTERM
                return replace(status, state=State.TIMEOUT, reason=str(OUT_OF_TIME), exit_code=code)
    return status


def blame(scheduler: Scheduler, status: Status, folder: Path, attempt: Path, job_id: str) -> Status:
    """Name in a run's status the line of its set-up that failed or, if no agent has, the rank that failed first."""
    if status.state is not State.FAILED or status.rank is not None:
        return status
    if found := _failed_setup(scheduler, folder, attempt, job_id):
        failed, excerpt = found
        cause = next(iter(excerpt.causes), None)
        return replace(status, reason=failed.what, exit_code=failed.code, cause=cause)
    if any(attempt.glob(f"node-*/{contract.AGENT_EVENTS}")):
        return status  # Agents know more.
    failure, logs = first_failure(attempt), logs_of(scheduler, folder, job_id)
    if failure is None and logs:
        failure = scheduler.failure(lines_of(logs[0]))
    if failure is None:
        return status
    of_ranks = {log.name for log in attempt.glob(f"node-*/{contract.rank_log('*', 'err')}")}
    code = failure.code if failure.code > 0 else 128 - failure.code
    if failure.rank is None or not of_ranks:
        return replace(status, exit_code=code)
    nodes = read_json(folder / contract.PLAN_FILE).get("nnodes", 1)
    reason = failure.in_words(with_host=nodes > 1)
    # A rank of another node may have no log yet: that node was still being set up.
    rank = failure.rank if contract.rank_log(failure.rank, "err") in of_ranks else None
    return replace(status, reason=reason, exit_code=code, rank=rank)


def _failed_setup(
    scheduler: Scheduler, folder: Path, attempt: Path, job_id: str
) -> tuple[SetupFailure, LogExcerpt] | None:
    """Return how the set-up of an attempt failed, if it did, and what its log says before."""
    for log in _logs_to_search(scheduler, folder, attempt, job_id):
        lines = [line for line in lines_of(log) if not (_NOISE.match(line) or scheduler.log_noise.match(line))]
        for at, line in enumerate(lines):
            if failure := agents.failure_in(line, folder):
                cause = find_cause(lines[:at])
                return failure, LogExcerpt(log, [cause] if cause else [], failure.fix)
    return None


def logs_of(scheduler: Scheduler, folder: Path, job_id: str) -> list[Path]:
    """Return the logs of a run's job that have text in them: of its script, and of the scheduler itself."""
    requested = {
        reason["subject"]: reason["value"] for reason in read_json(folder / contract.PLAN_FILE).get("reasons", ())
    }
    patterns = [glob.escape(requested[name]) for name in ("scheduler.error", "scheduler.output") if name in requested]
    patterns += scheduler.logs(glob.escape(str(folder)), job_id, requested)
    return [log for pattern in patterns for log in _with_text(pattern)]


def excerpt_of(scheduler: Scheduler, run: Run) -> LogExcerpt:
    """Find what may tell why a run's newest attempt ended: in its job's logs, or in the log of a node.

    That is what a set-up that failed has said, else at most two lines of the first log that has such a line; else the
    last line. What was in a log before the attempt does not count.
    """
    where = scheduler, run.folder, run.attempt_folder, run.job_id or ""
    if failed := _failed_setup(*where):
        return failed[1]
    found = LogExcerpt()
    for log in _logs_to_search(*where):
        lines = [line for line in lines_of(log) if not _NOISE.match(line)]
        causes = dict.fromkeys(line for line in lines if not (line[0].isspace() or scheduler.log_noise.match(line)))
        if causes:
            return LogExcerpt(log, [line.removeprefix("allranks: ") for line in [*causes][-2:]])
        if lines and not found.causes:
            found = LogExcerpt(log, lines[-1:])
        elif found.log is None:
            found = LogExcerpt(log)
    return found


def _logs_to_search(scheduler: Scheduler, folder: Path, attempt: Path, job_id: str) -> Iterator[Path]:
    """Yield the logs of an attempt's job, of the node that failed first, and of the first node."""
    yield from logs_of(scheduler, folder, job_id)
    first = first_failure(attempt)
    of_nodes = [first.folder / contract.AGENT_LOG] if first else []
    of_first = agents.log_excerpt(attempt / Path(contract.node_dir(0, 0)).name).log
    yield from filter(Path.exists, [*of_nodes, of_first] if of_first else of_nodes)


def _with_text(pattern: str) -> Iterator[Path]:
    """Yield the files that an absolute pattern fits and that are not empty, the one that was changed last first."""
    found = []
    for path in Path("/").glob(pattern.lstrip("/")):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found += [(stat.st_mtime, path)] if stat.st_size else []
    yield from (path for _, path in sorted(found, reverse=True))
