"""``allranks ps``: the runs here."""

from __future__ import annotations

import time

import click

from allranks.cli import render
from allranks.cli.runs import json_option, runs_folder
from allranks.errors import RunFolderError
from allranks.job.units import format_count
from allranks.runs.record import Run, load, run_ids, unreadable

_HEADER = ("RUN", "STATE", "RANKS", "CLUSTER", "STARTED", "TOOK", "EXIT", "CAUSE")
#: So much of a cause as fits beside the rest on a wide terminal.
_LONGEST_CAUSE = 60
#: As many runs of others are named.
_MOST_OTHERS = 5


@click.command("ps")
@click.option("--runs-folder", "folder", metavar="DIR", help="Folder that holds a folder for each run.")
@click.option("--last", "-n", type=click.IntRange(min=1), default=20, show_default=True, help="How many to list.")
@json_option
def command(folder: str | None, last: int, as_json: bool) -> int:
    """List the runs here, the newest last."""
    from allranks.clusters.settle import settled

    where = runs_folder(folder)
    runs = []
    for run_id in run_ids(where)[-last:]:
        try:
            runs.append(settled(load(where / run_id)))
        except RunFolderError as error:
            render.error(error)
    if others := unreadable(where):
        shown = ", ".join(others[:_MOST_OTHERS]) + (", ..." if len(others) > _MOST_OTHERS else "")
        render.talk(f"allranks: note: {format_count(len(others), 'run')} of other users cannot be read: {shown}")
    if as_json:
        render.as_json([{**run.record.to_json(), "folder": str(run.folder)} for run in runs])
    elif runs:
        render.data(render.table(_HEADER, map(_row, runs)))
    else:
        render.talk(f"no runs in {render.path(where)}\nnext: allranks run train.py")
    return 0


def _row(run: Run) -> tuple[str, ...]:
    record, status = run.record, run.record.status
    began = status.started or record.created
    took = render.seconds((status.ended or time.time()) - began) if status.ended or not status.state.is_final else "-"
    code = "-" if status.exit_code is None else str(status.exit_code)
    return (
        record.id,
        status.state.value,
        str(record.world_size),
        record.cluster,
        render.moment(began),
        took,
        code,
        (status.cause or "")[:_LONGEST_CAUSE],
    )
