"""The error of a run that did not succeed: what happened, why, what to do, where to look."""

from __future__ import annotations

from allranks import contract
from allranks.cli import render
from allranks.cli.runs import name_to_type, verdict_of
from allranks.clusters.registry import load_kind
from allranks.errors import AllranksError, LaunchError
from allranks.launch.verdict import reported_by_agent, resumes_from
from allranks.runs.agents import reported_by_all, task_name
from allranks.runs.blame import rank_log, with_cause
from allranks.runs.excerpts import FAILED_LINE
from allranks.runs.hangs import newest
from allranks.runs.record import Run
from allranks.runs.status import State

#: Exit codes above it are those of signals.
_SIGNALLED = 128


def explain(run: Run) -> AllranksError:
    """Return the error that says how the run ended."""
    status = run.record.status
    if reported := _of_agent(run):
        return reported
    if status.rank is not None:
        return _of_rank(run, status.rank)
    if status.state is State.FAILED and (hang := newest(run.attempt_folder)):
        why = render.one_line(hang.sentence)
        return LaunchError(f"{run.record.id} failed: {status.reason}", why=why, fix=_advice(run))
    if status.state is State.CANCELLED:
        name = name_to_type(run)
        fix = f"allranks logs {name} shows what it did, allranks resume {name} starts it again ({resumes_from(run)})"
        return LaunchError(f"{run.record.id} was cancelled", why=status.reason, fix=fix)
    if status.state is State.PREEMPTED:
        return LaunchError(f"{run.record.id} is to be continued", why=status.reason, fix=_advice(run))
    return _of_task(run) or _of_cluster(run)


def _of_agent(run: Run) -> LaunchError | None:
    """Return the error that an agent ended with."""
    if found := reported_by_agent(run):
        fields = {name: found.fields.get(name) for name in ("why", "see")}
        return LaunchError(found.fields.get("what", "the agent failed"), fix=_advice(run), **fields)
    return None


def _of_rank(run: Run, rank: int) -> AllranksError:
    status = run.record.status
    what, log = render.one_line(status.reason or f"rank {rank} failed"), rank_log(run.attempt_folder, rank)
    if log is None:  # Of a job whose nodes were started by hand, each node has only its own.
        return LaunchError(what, fix=f"allranks logs --rank {rank} where that rank ran: its output is not here")
    fix = _advice(run) or f"allranks logs {name_to_type(run)} --rank {rank}"
    is_silent = 0 < (status.exit_code or 0) < _SIGNALLED and not log.stat().st_size
    why = status.cause or ("it wrote nothing to stderr" if is_silent else None)
    return LaunchError(what, why=why, fix=fix, see=render.path(log))


def _advice(run: Run) -> str | None:
    """Return what to do about a failure, as ``allranks why`` says it too."""
    verdict = verdict_of(run)
    return verdict.fix.replace("RUN", name_to_type(run)) or None if verdict else None


def _of_task(run: Run) -> AllranksError | None:
    """Return the error of the first task of a job array in which a rank failed."""
    for attempt in run.tasks if run.record.status.state is State.FAILED else ():
        status = reported_by_all(attempt)
        if status.rank is not None and (log := rank_log(attempt, status.rank)):
            what = f"{run.record.id}, {task_name(attempt)}: {render.one_line(status.reason or '')}"
            why = with_cause(status, attempt, run.record.stop_timeout).cause
            return LaunchError(what, why=why, fix=_advice(run), see=render.path(log))
    return None


def _of_cluster(run: Run) -> AllranksError:
    said = load_kind(run.record.kind).log_excerpt(run)
    logs = f"node-*/{contract.rank_log('*', 'err')}"
    status = run.record.status
    what = f"{run.record.id} {status.state.value}"
    if status.reason:
        what += f": {render.one_line(status.reason)}"
    else:
        if status.state is State.FAILED and status.exit_code:
            what += f" with exit code {status.exit_code}"
        if not any(any(attempt.glob(logs)) for attempt in (run.attempt_folder, *run.tasks)):
            what += " before any rank had started"
    why = "; ".join(said.causes)[:500] or None
    of_setup = "correct that line, and run the job again" if FAILED_LINE.match(status.reason or "") else None
    fix = _advice(run) or said.fix.format(run=name_to_type(run)) or of_setup
    return LaunchError(what, why=why, fix=fix, see=render.path(said.log) if said.log else None)
