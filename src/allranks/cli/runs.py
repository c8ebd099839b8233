"""Arguments of the verbs that read runs, and where the runs are."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import render
from allranks.errors import RunFolderError

if TYPE_CHECKING:
    from allranks.runs.record import Run


def runs_folder(folder: str | None) -> Path:
    """Return the absolute folder of runs: as given, as ALLRANKS_RUNS_FOLDER says, or ``runs`` here."""
    return Path.cwd() / Path(folder or os.environ.get("ALLRANKS_RUNS_FOLDER") or "runs").expanduser()


def name_to_type(run: Run) -> str:
    """Return what to call a run in a command typed here: its id, or its folder where ids are not looked for."""
    if run.folder.parent == runs_folder(None).resolve():
        return run.record.id
    shown = render.path(run.folder)
    return shlex.quote(shown if os.sep in shown else f".{os.sep}{shown}")


def run_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the run's name and the folder of runs to a verb that reads a run."""
    function = click.option(
        "--runs-folder", "runs_folder_", metavar="DIR", help="Folder that holds a folder for each run."
    )(function)
    return click.argument("run", required=False, shell_complete=_complete_run)(function)


def _complete_run(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    from allranks.runs.record import run_ids

    ids = run_ids(runs_folder(ctx.params.get("runs_folder_")))
    return [run_id for run_id in reversed(ids) if run_id.startswith(incomplete)]


def settled_runs(folder: Path, ids: Iterable[str]) -> Iterator[Run]:
    """Yield runs, with what is known of them now; one whose record is damaged is reported and left out."""
    from allranks.clusters.settle import settled
    from allranks.runs.record import load

    for run_id in ids:
        try:
            yield settled(load(folder / run_id))
        except RunFolderError as error:
            render.error(error)


def report(run: Run) -> dict[str, Any]:
    """Return what is known of a run, as the verbs that report write it as JSON: times are those of ISO 8601."""
    found = run.record.to_json()
    times = {name: render.iso(found["status"][name]) for name in ("started", "ended")}
    return {
        **found,
        "created": render.iso(run.record.created),
        "status": {**found["status"], **times},
        "command": run.command,
        "folder": str(run.folder),
    }


def run_json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json`` to a verb that starts a run."""
    help_text = "Write the run as JSON to stdout, as status does, at its end or with --detach; all else goes to stderr."
    return click.option("--json", "as_json", is_flag=True, help=help_text)(function)


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json`` to a verb that reports."""
    return click.option("--json", "as_json", is_flag=True, help="Write JSON.")(function)
