"""``allranks status``: the state of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from allranks import contract
from allranks.cli import render
from allranks.cli.runs import json_option, name_to_type, next_resume, report, run_arguments, runs_folder, verdict_rows
from allranks.job.units import format_count, format_seconds, format_size
from allranks.runs.record import Run, find
from allranks.runs.status import NOT_STARTED, State

if TYPE_CHECKING:
    from allranks.runs.steptime import Position


@click.command("status")
@run_arguments
@json_option
def command(run: str | None, folder: str | None, as_json: bool) -> int:
    """Show a run's status: the newest here, or RUN (its id, the beginning of it, or its directory)."""
    found = find(runs_folder(folder), run)
    if not found.record.status.state.is_final:
        from allranks.launch.refresh import settled

        found = settled(found)
    if as_json:
        render.as_json({**report(found), "position": (where := _position(found)) and where._asdict()})
        return 0
    rows = [*_rows(found)]
    width = max(len(name) for name, _ in rows)
    render.data("\n".join(render.wrapped(f"{name:{width}}  ", render.one_line(value)) for name, value in rows))
    render.talk(_next(found))
    return 0


def _rows(run: Run) -> Iterator[tuple[str, str]]:
    record, status, handle = run.record, run.record.status, run.record.handle
    native = "" if status.native == "ended" else f"  {render.dim(status.native)}"
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
    verdict: dict[str, str] = {}
    saved: list[int] = []
    if status.state.is_final and status.state is not State.SUCCEEDED:
        from allranks.record.events import read_saves

        verdict = verdict_rows(run)
        saved = [save.step for save in read_saves(run.folder) if save.path]
    rows: dict[str, object] = {
        "run": record.id,
        "command": run.command,
        "state": render.state(status.state) + native,
        **_progress(run),
        "reason": status.reason,
        "cause": status.cause,
        **verdict,
        "exit code": None if status.exit_code is None else str(status.exit_code),
        "ranks": f"{record.world_size} on {format_count(record.nnodes, 'node')}",
        "cluster": record.cluster if record.cluster == record.kind else f"{record.cluster} ({record.kind})",
        "job": run.job_id,
        "agent": handle.pid and f"process {handle.pid} on {handle.host}{' (ended)' if status.state.is_final else ''}",
        "started": f"{started}  {render.dim(render.age(run.started))}",
        "took": None if run.seconds is None else format_seconds(run.seconds),
        "attempts": run.attempt and str(run.attempt + 1),
        "checkpoint": saved and f"step {saved[-1]}",
        "restarts": status.restarts and str(status.restarts),
        "memory": status.peak_memory and f"{format_size(status.peak_memory)} at most",
        "folder": render.path(run.folder),
    }
    return ((name, str(value)) for name, value in rows.items() if value)


def _position(run: Run) -> Position | None:
    if run.record.status.state is not State.RUNNING:
        return None
    from allranks.runs.steptime import position

    return position(run, time.time())


def _progress(run: Run) -> dict[str, object]:
    """Return where a running training is, or how long no rank has advanced; and for which rank the others wait."""
    if run.record.status.state is not State.RUNNING:
        return {}
    from allranks.runs.hangs import halted
    from allranks.runs.stragglers import inspect

    sentences, _ = inspect(run.attempt_folder)
    more = f" (and {format_count(len(sentences) - 1, 'more straggler')})" if len(sentences) > 1 else ""
    return {
        "progress": halted(run.attempt_folder) or _position(run),
        "straggler": sentences and sentences[0] + more,
    }


def _next(run: Run) -> str:
    status, name = run.record.status, name_to_type(run)
    if run.tasks:
        return f"next: ls {render.path(run.folder)}/{contract.TASK}*/attempts/*/node-* for the logs of each task"
    if status.native == NOT_STARTED and status.state is State.FAILED:
        return f"next: allranks why {name}"
    if status.state is State.UNKNOWN:
        return f"next: allranks logs {name}"
    if not status.state.is_final:
        return f"next: allranks logs -f {name}"
    if status.state in (State.CANCELLED, State.PREEMPTED):
        return next_resume(run)
    rank = f" --rank {status.rank}" if status.rank is not None else ""
    return f"next: allranks logs {name}{rank}"
