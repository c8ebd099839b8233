"""``allranks init``: a job file and a script to start from."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from allranks.cli import render
from allranks.errors import UsageError


@click.command("init")
@click.argument("folder", default=".", type=click.Path(file_okay=False))
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
def command(folder: str, force: bool) -> int:
    """Write a commented job.yaml and a train.py into FOLDER (default: here)."""
    from allranks.job.template import JOB_TEMPLATE, SCRIPT_TEMPLATE

    files = {Path(folder) / "job.yaml": JOB_TEMPLATE, Path(folder) / "train.py": SCRIPT_TEMPLATE}
    there = [str(path) for path in files if path.exists()]
    if there and not force:
        raise UsageError(f"{' and '.join(there)} exist{'s' * (len(there) == 1)} already", fix="--force overwrites")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
            render.talk(f"wrote {path}")
    except OSError as error:
        raise UsageError(f"cannot write into {folder}", why=error.strerror) from error
    render.talk("next: allranks run" + ("" if folder == "." else f" {shlex.quote(str(Path(folder) / 'job.yaml'))}"))
    return 0
