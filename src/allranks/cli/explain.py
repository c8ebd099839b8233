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
    folder = run.node_folder(0)
    if told := told_error(folder):
        fields = told.fields
        return LaunchError(
            fields.get("what", "the agent failed"), why=fields.get("why"), fix=fields.get("fix"), see=fields.get("see")
        )
    if status.rank is not None:
        return _of_rank(run, folder, status.rank)
    if status.state is State.CANCELLED:
        return LaunchError(
            f"{run.record.id} was cancelled", why=status.reason, fix=f"allranks logs {name_to_type(run)}"
        )
    if status.state is State.PREEMPTED:
        return LaunchError(
            f"{run.record.id} is to be continued",
            why=status.reason,
            fix="start it again with the same folder of checkpoints",
        )
    return _of_agent(run, folder)


def _of_rank(run: Run, folder: Path, rank: int) -> AllranksError:
    log = folder / contract.rank_log(rank, "err")
    return LaunchError(
        run.record.status.reason or f"rank {rank} failed",
        why=_last_line(log),
        fix=f"allranks logs {name_to_type(run)} --rank {rank}",
        see=render.path(log),
    )


def _of_agent(run: Run, folder: Path) -> AllranksError:
    log = folder / contract.AGENT_LOG
    return LaunchError(
        f"{run.record.id} {run.record.status.state.value}: {run.record.status.reason}",
        why=_last_line(log),
        see=render.path(log),
    )


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
