"""What to tell a user about a run that did not succeed: what, why, what to do, where to look."""

from __future__ import annotations

from allranks import contract
from allranks.cli import render
from allranks.cli.runs import name_to_type
from allranks.clusters.agents import told_error
from allranks.clusters.registry import load_kind
from allranks.errors import AllranksError, LaunchError
from allranks.runs.last_line import last_line
from allranks.runs.record import Run
from allranks.runs.status import State


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
    return _of_cluster(run)


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
    name = contract.rank_log(rank, "err")
    log = next(run.attempt_folder.glob(f"*/{name}"), run.node_folder(0) / name)
    return LaunchError(
        run.record.status.reason or f"rank {rank} failed",
        why=last_line(log),
        fix=f"allranks logs {name_to_type(run)} --rank {rank}",
        see=render.path(log),
    )


def _of_cluster(run: Run) -> AllranksError:
    said = load_kind(run.record.kind).said(run)
    started = any(run.attempt_folder.glob(f"node-*/{contract.rank_log('*', 'err')}"))
    what = _how(run) if started or run.record.status.reason else f"{_how(run)} before any rank had started"
    return LaunchError(what, why="; ".join(said.causes)[:500] or None, see=render.path(said.log) if said.log else None)


def _how(run: Run) -> str:
    status = run.record.status
    if status.reason:
        return f"{run.record.id} {status.state.value}: {status.reason}"
    code = f" with exit code {status.exit_code}" if status.state is State.FAILED and status.exit_code else ""
    return f"{run.record.id} {status.state.value}{code}"
