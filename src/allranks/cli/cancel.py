"""``allranks cancel``: end a run."""

from __future__ import annotations

import click

from allranks.cli import render
from allranks.cli.runs import run_arguments, runs_folder
from allranks.runs.record import find
from allranks.runs.status import State


@click.command("cancel")
@run_arguments
def command(run: str | None, runs_folder_: str | None) -> int:
    """End a run, and return when nothing of it is left: the newest here, or RUN."""
    from allranks.clusters.cancel import cancel
    from allranks.clusters.registry import load_kind
    from allranks.clusters.settle import settled

    found = settled(find(runs_folder(runs_folder_), run))
    record = found.record
    if record.status.state.is_final:
        render.talk(f"{record.id} had ended before: {record.status.state.value}")
        return 0
    state = cancel(found, load_kind(record.kind)).record.status.state
    render.talk(f"{record.id} {'has not started, and will not' if state is State.PENDING else state.value.lower()}")
    return 0
