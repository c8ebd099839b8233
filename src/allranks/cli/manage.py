"""Verbs that manage the runs of a directory: ``allranks ps``, ``cancel`` and ``prune``."""

from __future__ import annotations

import re
import shlex
import time
from itertools import chain, islice
from pathlib import Path

import click

from allranks import contract
from allranks.cli import render
from allranks.cli.runs import (
    folder_option,
    json_option,
    name_to_type,
    report,
    run_arguments,
    runs_folder,
    settled_runs,
    unfinished,
)
from allranks.errors import RunFolderError, UsageError
from allranks.job.units import format_count, format_seconds
from allranks.runs.record import Run, find, is_mine, run_ids, unreadable, where_runs_are
from allranks.runs.status import State

_HEADER = ("RUN", "STATE", "EXIT", "RANKS", "CLUSTER", "STARTED", "TOOK", "COMMAND", "REASON")
#: A note or an error names no more runs.
_MOST_NAMED = 5
_AGE = re.compile(r"([1-9]\d{0,5})\s*([hdwy])", re.ASCII)
_HOURS = {"h": 1, "d": 24, "w": 7 * 24, "y": 365 * 24}


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
def ps(folder: str | None, last: int, states: tuple[str, ...], as_json: bool) -> int:
    """List the runs here, the newest last."""
    where = runs_folder(folder)
    found = settled_runs(where, reversed(run_ids(where)))
    runs = [*islice((run for run in found if not states or run.record.status.state.value in states), last)][::-1]
    if others := unreadable(where):
        shown = ", ".join(others[:_MOST_NAMED]) + (", ..." if len(others) > _MOST_NAMED else "")
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
    began = status.started or record.created
    took = format_seconds((status.ended or time.time()) - began) if status.ended or not status.state.is_final else "-"
    code = "-" if status.exit_code is None else str(status.exit_code)
    reason = ": ".join(filter(None, (status.reason, status.cause)))
    what = (record.id, render.state(status.state), code, str(record.world_size), record.cluster)
    return (*what, render.age(began), took, run.command or "-", reason)


@click.command("cancel")
@run_arguments
@json_option
def cancel(run: str | None, folder: str | None, as_json: bool) -> int:
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


@click.command("prune")
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Keep the N newest runs.")
@click.option("--older-than", metavar="TIME", help="Remove only runs that ended longer ago: 12h, 30d, 2w, 1y.")
@click.option("--checkpoints", "with_checkpoints", is_flag=True, help="Remove the checkpoints of these runs too.")
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@folder_option
def prune(keep: int | None, older_than: str | None, with_checkpoints: bool, dry_run: bool, folder: str | None) -> int:
    """Remove the directories of your old runs that have ended, with their logs; their checkpoints stay.

    With --keep and --older-than, a run is removed if both allow it.
    """
    if keep is None and older_than is None:
        raise UsageError("--keep or --older-than is needed", fix="allranks prune --keep 20, or --older-than 30d")
    before = time.time() - (_hours(older_than) * 3600 if older_than is not None else 0)
    where, removed = runs_folder(folder), 0
    ids = [run_id for run_id in run_ids(where) if is_mine(where / run_id)]
    for run in settled_runs(where, ids[: -keep if keep else None]):
        ended = run.record.status.ended or run.record.created
        if not run.record.status.state.is_final or ended > before:
            continue  # It continues, or is too new.
        kept = [] if with_checkpoints else _checkpoints(run)
        if not dry_run:
            _remove(run.folder, kept)
        removed += 1
        stays = f"; stays: {', '.join(map(render.path, kept))}" if kept else ""
        render.talk(f"{'would remove' if dry_run else 'removed'} {run.record.id}, {render.age(ended)}{stays}")
    latest = where / contract.LATEST
    if latest.is_symlink() and not latest.exists():
        latest.unlink()
    render.talk(f"{format_count(removed, 'run')} {'would be ' if dry_run else ''}removed")
    return 0


def _hours(age: str) -> int:
    """Return the hours of an age. Minutes are none: ``1m`` may mean a month, and what is removed is gone."""
    if found := _AGE.fullmatch(age.strip().lower()):
        return int(found[1]) * _HOURS[found[2]]
    raise UsageError(f"invalid --older-than: {age!r}", fix="hours, days, weeks or years: 12h, 30d, 2w or 1y")


def _checkpoints(run: Run) -> list[Path]:
    """Return what of a run's directory holds checkpoints of ``ctx.checkpoints()``."""
    from allranks.record.events import read_saves

    folder = run.folder.resolve()
    saved = {Path(save.path).resolve() for save in read_saves(run.folder) if save.path}
    here = {path for path in saved if path.exists() and path.is_relative_to(folder)}
    return sorted({run.folder / path.relative_to(folder).parts[0] for path in here})


def _remove(folder: Path, kept: list[Path]) -> None:
    """Remove a directory but for some entries; its record goes last, so that what was interrupted can continue."""
    import shutil  # It imports all that compresses files: ps and cancel start sooner without it.

    record = folder / contract.RECORD_FILE
    entries = [entry for entry in folder.iterdir() if entry not in (*kept, record)]
    try:
        for entry in [*entries, record]:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        if not kept:
            folder.rmdir()
    except OSError as error:
        fix = f"ls -la {shlex.quote(render.path(folder))} shows whose it is"
        raise RunFolderError(f"cannot remove {render.path(folder)}", why=error.strerror, fix=fix) from error
