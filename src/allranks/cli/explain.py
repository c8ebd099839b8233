"""What to tell a user about a run that did not succeed: what, why, what to do, where to look."""

from __future__ import annotations

from allranks import contract
from allranks.cli import render
from allranks.cli.runs import name_to_type
from allranks.clusters.agents import task_name, told_by_all, told_error
from allranks.clusters.blame import rank_log, with_cause
from allranks.clusters.registry import load_kind
from allranks.errors import AllranksError, LaunchError
from allranks.runs.record import Run
from allranks.runs.status import State

#: The error of input() in a rank that has no stdin, and an interpreter of its own.
_NO_INPUT = "EOFError: EOF when reading a line"


def explain(run: Run) -> AllranksError:
    """Make the error that says how the run ended."""
    status = run.record.status
    if told := _told(run):
        return told
    if status.rank is not None:
        return _of_rank(run, status.rank)
    if status.state is State.CANCELLED:
        name = name_to_type(run)
        return LaunchError(
            f"{run.record.id} was cancelled",
            why=status.reason,
            fix=f"allranks logs {name} shows what it did, allranks resume {name} goes on with it",
        )
    if status.state is State.PREEMPTED:
        return LaunchError(
            f"{run.record.id} is to be continued",
            why=status.reason,
            fix=f"allranks resume {name_to_type(run)}",
        )
    return _of_task(run) or _of_cluster(run)


def _told(run: Run) -> LaunchError | None:
    """Return the error that an agent ended with; one of another node than the first only where no rank is to blame."""
    first = run.node_folder(0)
    others = () if run.record.status.rank is not None else sorted(run.attempt_folder.glob("node-*"))
    for folder in (first, *others):
        if told := told_error(folder):
            fields = {name: told.fields.get(name) for name in ("why", "fix", "see")}
            return LaunchError(told.fields.get("what", "the agent failed"), **fields)
    return None


def _of_rank(run: Run, rank: int) -> AllranksError:
    what, log = render.one_line(run.record.status.reason or f"rank {rank} failed"), rank_log(run.attempt_folder, rank)
    if log is None:  # Of a job whose nodes were started by hand, each node has only its own.
        return LaunchError(what, fix=f"allranks logs --rank {rank} where that rank ran: its output is not here")
    fix = f"allranks logs {name_to_type(run)} --rank {rank}"
    if (
        run.record.kind == "local"
        and run.record.world_size > 1
        and (run.record.status.cause or "").startswith(_NO_INPUT)
    ):
        fix = f"allranks run --stdin {rank} gives this rank the terminal"
    return LaunchError(what, why=run.record.status.cause, fix=fix, see=render.path(log))


def _of_task(run: Run) -> AllranksError | None:
    """Return what the first task of a job array tells in which a rank is to blame."""
    for attempt in run.tasks if run.record.status.state is State.FAILED else ():
        told = told_by_all(attempt)
        if told.rank is not None and (log := rank_log(attempt, told.rank)):
            return LaunchError(
                f"{run.record.id}, {task_name(attempt)}: {render.one_line(told.reason or '')}",
                why=with_cause(told, attempt, run.record.stop_timeout).cause,
                see=render.path(log),
            )
    return None


def _of_cluster(run: Run) -> AllranksError:
    said = load_kind(run.record.kind).said(run)
    logs = f"node-*/{contract.rank_log('*', 'err')}"
    started = any(any(attempt.glob(logs)) for attempt in (run.attempt_folder, *run.tasks))
    what = _how(run) if started or run.record.status.reason else f"{_how(run)} before any rank had started"
    why = "; ".join(said.causes)[:500] or None
    fix = said.fix.format(run=name_to_type(run)) or None
    return LaunchError(what, why=why, fix=fix, see=render.path(said.log) if said.log else None)


def _how(run: Run) -> str:
    status = run.record.status
    if status.reason:
        return f"{run.record.id} {status.state.value}: {render.one_line(status.reason)}"
    code = f" with exit code {status.exit_code}" if status.state is State.FAILED and status.exit_code else ""
    return f"{run.record.id} {status.state.value}{code}"
