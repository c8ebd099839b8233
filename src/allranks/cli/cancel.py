"""``allranks cancel``: end a run."""

from __future__ import annotations

import click

from allranks.cli import render
from allranks.cli.runs import json_option, name_to_type, report, run_arguments, runs_folder, unfinished
from allranks.errors import UsageError
from allranks.runs.record import find
from allranks.runs.status import State

#: An error names no more runs.
_MOST_NAMED = 5


@click.command("cancel")
@run_arguments
@json_option
def command(run: str | None, folder: str | None, as_json: bool) -> int:
    """Cancel a run, and return when nothing of it is left: the one here that has not ended, or RUN.

    Where several have not ended, RUN must be given.
    """
    from allranks.clusters.registry import load_kind
    from allranks.launch.cancel import cancel
    from allranks.launch.refresh import settled

    found = settled(find(runs_folder(folder), run or _only(folder)))
    record = found.record
    if record.status.state.is_final:
        render.talk(f"{record.id} had ended before: {record.status.state.value}")
    else:
        found = cancel(found, load_kind(record.kind))
        render.talk(f"{record.id} {found.record.status.state.value.lower()}")
    if as_json:
        render.as_json(report(found))
    return 0


def _only(folder: str | None) -> str | None:
    """Return the run to cancel where none is named: the only one that has not ended, or None for the newest.

    Raises:
        UsageError: several have not ended.
    """
    found = [*unfinished(folder)]
    # What cannot be looked up, such as a run of a machine that is gone, does not stand in the way of those that can.
    found = [run for run in found if run.record.status.state is not State.UNKNOWN] or found
    if len(found) > 1:
        names = ", ".join(run.record.id for run in found[:_MOST_NAMED]) + ", …" * (len(found) > _MOST_NAMED)
        raise UsageError(f"{len(found)} runs have not ended: {names}", fix=f"allranks cancel {name_to_type(found[0])}")
    return str(found[0].folder) if found else None
