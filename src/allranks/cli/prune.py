"""``allranks prune``: remove old runs."""

from __future__ import annotations

import re
import shlex
import shutil
import time
from pathlib import Path

import click

from allranks import contract
from allranks.cli import render
from allranks.cli.runs import folder_option, runs_folder, settled_runs
from allranks.errors import RunFolderError, UsageError
from allranks.job.units import format_count
from allranks.record.events import read_saves
from allranks.runs.record import Run, is_mine, run_ids

_AGE = re.compile(r"([1-9]\d{0,5})\s*([hdwy])", re.ASCII)
_HOURS = {"h": 1, "d": 24, "w": 7 * 24, "y": 365 * 24}


@click.command("prune")
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Keep the N newest runs.")
@click.option("--older-than", metavar="TIME", help="Remove only runs that ended longer ago: 12h, 30d, 2w, 1y.")
@click.option("--checkpoints", "with_checkpoints", is_flag=True, help="Remove the checkpoints of these runs too.")
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@folder_option
def command(keep: int | None, older_than: str | None, with_checkpoints: bool, dry_run: bool, folder: str | None) -> int:
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
    folder = run.folder.resolve()
    saved = {Path(save.path).resolve() for save in read_saves(run.folder) if save.path}
    here = {path for path in saved if path.exists() and path.is_relative_to(folder)}
    return sorted({run.folder / path.relative_to(folder).parts[0] for path in here})


def _remove(folder: Path, kept: list[Path]) -> None:
    """Remove a directory but for some entries; its record goes last, so that what was interrupted can continue."""
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
