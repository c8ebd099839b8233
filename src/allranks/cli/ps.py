"""``allranks ps``: the runs here."""

from __future__ import annotations

from itertools import chain, islice

import click

from allranks.cli import render
from allranks.cli.runs import folder_option, json_option, report, runs_folder, settled_runs
from allranks.job.units import format_count, format_seconds
from allranks.runs.record import Run, run_ids, unreadable, where_runs_are
from allranks.runs.status import State

_HEADER = ("RUN", "STATE", "EXIT", "RANKS", "CLUSTER", "STARTED", "TOOK", "COMMAND", "REASON")
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
@json_option
def command(folder: str | None, last: int, states: tuple[str, ...], as_json: bool) -> int:
    """List the runs here, the newest last."""
    where = runs_folder(folder)
    found = settled_runs(where, reversed(run_ids(where)))
    runs = [*islice((run for run in found if not states or run.record.status.state.value in states), last)][::-1]
    if others := unreadable(where):
        shown = ", ".join(others[:_MOST_OTHERS]) + (", ..." if len(others) > _MOST_OTHERS else "")
        render.talk(f"allranks: note: {format_count(len(others), 'run')} of other users cannot be read: {shown}")
    if as_json:
        render.as_json([report(run) for run in runs])
        return 0
    if runs:
        render.data(_table(list(map(_row, runs))), cut=True)
    elif states:
        render.talk(f"no runs in {render.path(where)} are {' or '.join(states)}")
    else:
        render.talk(f"no runs in {render.path(where)}\nnext: {where_runs_are(where).removeprefix('start one: ')}")
    return 0


def _table(rows: list[tuple[str, ...]]) -> str:
    """Align rows; where the terminal is too narrow, each reason goes below its row."""
    whole = render.table(_HEADER, rows)
    if render.fits(whole):
        return whole
    header, *lines = render.table(_HEADER[:-1], [row[:-1] for row in rows]).splitlines()
    shown = (
        [line, f"  {render.one_line(row[-1])}"] if row[-1] else [line] for line, row in zip(lines, rows, strict=True)
    )
    return "\n".join([header, *chain.from_iterable(shown)])


def _row(run: Run) -> tuple[str, ...]:
    record, status = run.record, run.record.status
    took = "-" if run.seconds is None else format_seconds(run.seconds)
    code = "-" if status.exit_code is None else str(status.exit_code)
    reason = ": ".join(filter(None, (status.reason, status.cause)))
    what = (record.id, render.state(status.state), code, str(record.world_size), record.cluster)
    return (*what, render.age(run.started), took, run.command or "-", reason)
