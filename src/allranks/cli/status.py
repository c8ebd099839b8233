"""``allranks status``: what became of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click

from allranks import contract
from allranks.cli import render
from allranks.cli.runs import json_option, name_to_type, report, run_arguments, runs_folder
from allranks.job.units import format_count, format_size
from allranks.runs.record import Run, find
from allranks.runs.status import State


@click.command("status")
@run_arguments
@json_option
def command(run: str | None, runs_folder_: str | None, as_json: bool) -> int:
    """Show a run's status: the newest here, or RUN (its id, the beginning of it, or its folder)."""
    found = find(runs_folder(runs_folder_), run)
    if not found.record.status.state.is_final:
        from allranks.clusters.settle import settled

        found = settled(found)
    if as_json:
        render.as_json(report(found))
        return 0
    render.data(render.pairs(_rows(found)))
    render.talk(_next(found))
    return 0


def _rows(run: Run) -> Iterator[tuple[str, str]]:
    record, status = run.record, run.record.status
    yield "run", record.id
    if command := run.command:
        yield "command", command
    native = "" if status.native == "ended" else f"  {render.dim(status.native)}"
    yield "state", render.state(status.state) + native
    if status.reason:
        yield "reason", status.reason
    if status.cause:
        yield "cause", status.cause
    if status.exit_code is not None:
        yield "exit code", str(status.exit_code)
    yield "ranks", f"{record.world_size} on {format_count(record.nnodes, 'node')}"
    yield "cluster", record.cluster if record.cluster == record.kind else f"{record.cluster} ({record.kind})"
    if job := run.job_id:
        yield "job", job
    if record.handle.pid:
        yield "agent", f"process {record.handle.pid} on {record.handle.host}"
    began = status.started or record.created
    yield "started", f"{render.moment(began)}  {render.dim(render.age(began))}"
    if status.ended or not status.state.is_final:
        yield "took", render.seconds((status.ended or time.time()) - began)
    if run.attempt:
        yield "attempts", str(run.attempt + 1)
    if status.restarts:
        yield "restarts", str(status.restarts)
    if status.peak_memory:
        yield "memory", f"{format_size(status.peak_memory)} at most"
    yield "folder", render.path(run.folder)


def _next(run: Run) -> str:
    status, name = run.record.status, name_to_type(run)
    if run.tasks:
        return f"next: ls {render.path(run.folder)}/{contract.TASK}*/attempts/*/node-* for the logs of each task"
    if status.state is State.UNKNOWN:
        return f"next: allranks logs {name}"
    if not status.state.is_final:
        return f"next: allranks logs -f {name}"
    rank = f" --rank {status.rank}" if status.rank is not None else ""
    return f"next: allranks logs {name}{rank}"
