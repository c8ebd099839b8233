"""``allranks cancel``: end a run."""

from __future__ import annotations

import click

from allranks.cli import render
from allranks.cli.runs import json_option, report, run_arguments, runs_folder
from allranks.runs.record import find


@click.command("cancel")
@run_arguments
@json_option
def command(run: str | None, folder: str | None, as_json: bool) -> int:
    """Cancel a run, and return when nothing of it is left: the newest here, or RUN."""
    from allranks.clusters.registry import load_kind
    from allranks.launch.cancel import cancel
    from allranks.launch.refresh import settled

    found = settled(find(runs_folder(folder), run))
    record = found.record
    if record.status.state.is_final:
        render.talk(f"{record.id} had ended before: {record.status.state.value}")
    else:
        found = cancel(found, load_kind(record.kind))
        render.talk(f"{record.id} {found.record.status.state.value.lower()}")
    if as_json:
        render.as_json(report(found))
    return 0
