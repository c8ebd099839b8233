"""``allranks cancel``: end a run."""

from __future__ import annotations

import click

from allranks.cli import render
from allranks.cli.runs import run_arguments, runs_folder
from allranks.runs.record import find


@click.command("cancel")
@run_arguments
def command(run: str | None, runs_folder_: str | None) -> int:
    """End a run, and return when nothing of it is left: the newest here, or RUN."""
    from allranks.clusters.registry import load_kind
    from allranks.clusters.settle import settled

    found = settled(find(runs_folder(runs_folder_), run))
    record = found.record
    if record.status.state.is_final:
        render.talk(f"{record.id} had ended before: {record.status.state.value}")
        return 0
    kind = load_kind(record.kind)
    kind.cancel(found)
    found = settled(found, kind)
    render.talk(f"{record.id} {found.record.status.state.value.lower()}")
    return 0
