"""``allranks ps``: the runs here."""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path

import click

from allranks.cli import render
from allranks.cli.runs import folder_option, json_option, report, runs_folder, settled_runs
from allranks.job.units import format_count, format_seconds
from allranks.runs.record import Run, run_ids, unreadable, where_runs_are
from allranks.runs.status import State

_HEADER = ("RUN", "STATE", "EXIT", "RANKS", "CLUSTER", "STARTED", "TOOK", "COMMAND", "REASON")
_SECONDS = 2.0
#: As many runs of others are named.
_MOST_OTHERS = 5


@click.command("ps")
@folder_option
@click.option("--last", "-n", type=click.IntRange(min=1), default=20, show_default=True, help="How many to list.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in State], case_sensitive=False),
    help="Only runs in this state; may be given several times.",
)
@click.option("--watch", "-w", "is_watched", is_flag=True, help="Refresh every 2 s, on a terminal.")
@json_option
def command(folder: str | None, last: int, states: tuple[str, ...], is_watched: bool, as_json: bool) -> int:
    """List the runs here, the newest last."""
    is_watched = is_watched and not as_json and render.is_lively(sys.stdout)
    if is_watched:
        last = min(last, max(1, render.frame_lines() - 1))  # The newest come last, and would be cut off.
    where = runs_folder(folder)
    runs = _runs(where, last, states)
    if others := unreadable(where):
        shown = ", ".join(others[:_MOST_OTHERS]) + (", ..." if len(others) > _MOST_OTHERS else "")
        render.talk(f"allranks: note: {format_count(len(others), 'run')} of other users cannot be read: {shown}")
    if as_json:
        render.as_json([report(run) for run in runs])
        return 0
    while is_watched:
        render.frame(_text(runs))
        time.sleep(_SECONDS)
        runs = _runs(where, last, states)
    if runs:
        render.data(_text(runs), cut=True)
    elif states:
        render.talk(f"no runs in {render.path(where)} are {' or '.join(states)}")
    else:
        render.talk(f"no runs in {render.path(where)}\nnext: {where_runs_are(where).removeprefix('start one: ')}")
    return 0


def _runs(where: Path, last: int, states: tuple[str, ...]) -> list[Run]:
    """Return the newest runs, in these states or in any, the newest last."""
    found = settled_runs(where, reversed(run_ids(where)))
    return [*islice((run for run in found if not states or run.record.status.state.value in states), last)][::-1]


def _text(runs: list[Run]) -> str:
    return render.table(_HEADER, map(_row, runs))


def _row(run: Run) -> tuple[str, ...]:
    record, status = run.record, run.record.status
    began = status.started or record.created
    took = format_seconds((status.ended or time.time()) - began) if status.ended or not status.state.is_final else "-"
    code = "-" if status.exit_code is None else str(status.exit_code)
    reason = ": ".join(filter(None, (status.reason, status.cause)))
    what = (record.id, render.state(status.state), code, str(record.world_size), record.cluster)
    return (*what, render.age(began), took, run.command or "-", reason)
