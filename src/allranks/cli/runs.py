"""Arguments of the verbs that read runs, and where the runs are."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import render
from allranks.errors import RunFolderError, UsageError

if TYPE_CHECKING:
    from allranks.diagnosis.model import Diagnosis
    from allranks.runs.record import Run

#: The rules for exceptions and exits of the script itself, of which the log says more than any advice.
_OWN = ("script-exception", "script-exit")


def runs_folder(folder: str | None) -> Path:
    """Return the absolute runs directory: as given, as ALLRANKS_RUNS_FOLDER says, or ``runs`` here."""
    return Path.cwd() / Path(folder or os.environ.get("ALLRANKS_RUNS_FOLDER") or "runs").expanduser()


def name_to_type(run: Run) -> str:
    """Return the name of a run in a command typed here: its id, or its directory if that is not in ``runs``."""
    if run.folder.parent == runs_folder(None).resolve():
        return run.record.id
    shown = render.path(run.folder)
    return shlex.quote(shown if os.sep in shown else f".{os.sep}{shown}")


def next_resume(run: Run) -> str:
    """Return the line that offers to resume a run that was stopped."""
    from allranks.launch.verdict import resumes_from  # Completion has no time for it.

    return f"next: allranks resume {name_to_type(run)} ({resumes_from(run)})"


#: Options of verbs that start a run, of those that report, and of those that read all runs of a directory.
run_json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Write the run as JSON to stdout, as status does, at its end or with --detach; all else goes to stderr.",
)
metric_option = click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Metric to show first below the log (default: loss); repeatable. Others follow in the order of the script.",
)
plain_option = click.option(
    "--plain", is_flag=True, help="On a terminal, draw no status line, spinner or progress bar below the log."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")
folder_option = click.option("--runs-folder", "folder", metavar="DIR", help="Directory of all runs.")


def run_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the run's name and the runs directory to a verb that reads a run."""
    return click.argument("run", required=False, shell_complete=complete_run)(folder_option(function))


def comma_separated(given: Iterable[str]) -> list[str]:
    """Return the names that an option was given, which may be repeated, and have several, separated by commas."""
    return [name for part in ",".join(given).split(",") if (name := part.strip())]


def complete_run(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the runs whose ids start with what is typed, the newest first."""
    from allranks.runs.record import run_ids

    ids = run_ids(runs_folder(ctx.params.get("folder")))
    return [run_id for run_id in reversed(ids) if run_id.startswith(incomplete)]


def settled_runs(folder: Path, ids: Iterable[str]) -> Iterator[Run]:
    """Yield runs with their status now; one whose record is corrupt is reported and left out."""
    from allranks.launch.refresh import settled
    from allranks.runs.record import load

    for run_id in ids:
        try:
            yield settled(load(folder / run_id))
        except RunFolderError as error:
            render.error(error)


def unfinished(folder: str | None) -> Iterator[Run]:
    """Return the runs that have not ended, with their status now, the newest first.

    Raises:
        RunNotFoundError: there is no run.
    """
    from allranks.launch.refresh import settled
    from allranks.runs.record import newest_first

    now = map(settled, newest_first(runs_folder(folder)))  # A status that is final is not looked up.
    return (run for run in now if not run.record.status.state.is_final)


def find_unfinished(folder: str | None, run: str | None) -> Run:
    """Find a run by its name; without one, the newest that has not ended, or else the newest."""
    from allranks.runs.record import find

    return (None if run else next(unfinished(folder), None)) or find(runs_folder(folder), run)


def find_each(folder: str | None, names: Iterable[str | None]) -> list[Run]:
    """Find runs by their names, which are different runs, with their status now; None is the newest.

    Raises:
        UsageError: one is given twice.
    """
    from allranks.launch.refresh import settled
    from allranks.runs.record import find

    runs = [settled(find(runs_folder(folder), name)) for name in names]
    if twice := [run.record.id for run in runs if runs.count(run) > 1]:
        raise UsageError(f"{twice[0]} is given twice", fix="name two different runs; allranks ps lists them")
    return runs


def verdict_of(run: Run) -> Diagnosis | None:
    """Return the verdict on a run; None if there is none, or a log cannot be read: the failure is reported anyway."""
    from allranks.launch.verdict import verdict_on  # Not for those who look at a run that continues.

    try:
        return verdict_on(run)
    except (OSError, RunFolderError):
        return None


def verdict_rows(run: Run) -> dict[str, str]:
    """Return the short form of the verdict on a failed run: ``diagnosis`` and ``retry``; empty if it is unknown."""
    from allranks.launch.verdict import has_failed

    verdict = verdict_of(run) if has_failed(run) else None
    if verdict is None or verdict.sure == "unknown" or verdict.cause == run.record.status.reason:
        return {}
    rows = {"diagnosis": f"{verdict.cause} ({', '.join(filter(None, (verdict.place, verdict.sure)))})"}
    if verdict.retry:  # Of a hang it is not known.
        rows["retry"] = render.RETRY[verdict.retry]
    return rows


def report_verdict(run: Run, *, beside_error: bool = False) -> None:
    """Report the short form on stderr, in a line; beside the error of the run only what that does not say itself."""
    if beside_error and (verdict := verdict_of(run)) and verdict.id in _OWN:
        is_placed = bool(verdict.place) and verdict.place in (run.record.status.cause or "")
        if is_placed or verdict.sure == "certain":
            return
    if rows := verdict_rows(run):
        retry = f"; a retry {rows['retry']}" if "retry" in rows else ""
        line = rows["diagnosis"] + retry
        render.talk(f"allranks: {run.record.id}: diagnosis: {render.one_line(line)}")


def report(run: Run) -> dict[str, Any]:
    """Return a run's record as verbs write it as JSON, with times in ISO 8601; of a failed run with the verdict."""
    verdict = None
    if run.record.status.state.is_final:
        from dataclasses import asdict

        from allranks.launch.verdict import has_failed

        explained = verdict_of(run) if has_failed(run) else None
        verdict = explained and asdict(explained)
    found = run.record.to_json()
    times = {name: render.iso(found["status"][name]) for name in ("started", "ended")}
    return {
        **found,
        "created": render.iso(run.record.created),
        "status": {**found["status"], **times},
        "diagnosis": verdict,
        "command": run.command,
        "folder": str(run.folder),
    }
