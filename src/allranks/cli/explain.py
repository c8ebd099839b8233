"""What to tell a user about a run that did not succeed: what, why, what to do, where to look."""

from __future__ import annotations

import re
from pathlib import Path

from allranks import contract
from allranks.cli import render
from allranks.cli.runs import name_to_type
from allranks.clusters.agents import told_error
from allranks.errors import AllranksError, LaunchError
from allranks.runs.record import Run
from allranks.runs.status import State

_TAIL_BYTES = 65536
#: What torch puts before each line of a traceback, and how lines of its own log begin: no cause stands there.
_TORCH_RANK = re.compile(r"^\[rank\d+\]: ?")
_TORCH_LOG = re.compile(r"\[(?:rank\d+\]:\[)?[IW]\d{4} ")


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
    return _of_scheduler(run) if run.record.kind == "slurm" else _of_agent(run)


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
        why=_last_line(log),
        fix=f"allranks logs {name_to_type(run)} --rank {rank}",
        see=render.path(log),
    )


def _of_agent(run: Run) -> AllranksError:
    log = run.node_folder(0) / contract.AGENT_LOG
    return LaunchError(_how(run), why=_last_line(log), see=render.path(log) if log.exists() else None)


def _of_scheduler(run: Run) -> AllranksError:
    from allranks.clusters import slurm_said

    log = slurm_said.log_of(run)
    started = any(run.attempt_folder.glob(f"node-*/{contract.rank_log('*', 'err')}"))
    what = _how(run) if started or run.record.status.reason else f"{_how(run)} before any rank had started"
    said = "; ".join(slurm_said.causes(log)) if log else ""
    return LaunchError(what, why=said[:500] or None, see=render.path(log) if log else None)


def _how(run: Run) -> str:
    status = run.record.status
    if status.reason:
        return f"{run.record.id} {status.state.value}: {status.reason}"
    code = f" with exit code {status.exit_code}" if status.state is State.FAILED and status.exit_code else ""
    return f"{run.record.id} {status.state.value}{code}"


def _last_line(path: Path) -> str | None:
    """Return the last line with text in it of a file's end, if it has any."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    said = [text for line in lines if (text := _TORCH_RANK.sub("", line).strip()) and not _TORCH_LOG.match(text)]
    return said[-1].removeprefix("allranks: ")[:500] if said else None
