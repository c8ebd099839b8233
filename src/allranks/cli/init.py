"""``allranks init``: a job file and a script to start from."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from allranks.cli import render
from allranks.errors import UsageError


@click.command("init")
@click.argument("folder", default=".", type=click.Path(file_okay=False))
@click.option("--minimal", is_flag=True, help="Write the shortest script that trains, and a job file of one line.")
@click.option("--force", is_flag=True, help="Overwrite job.yaml and train.py if they exist.")
def command(folder: str, minimal: bool, force: bool) -> int:
    """Write a commented job.yaml, a train.py and a .gitignore into FOLDER (default: here).

    A .gitignore that exists keeps its lines, and gets those that are missing.
    """
    from allranks.job.template import JOB_TEMPLATE, MINIMAL_JOB, MINIMAL_SCRIPT, SCRIPT_TEMPLATE

    job, script = (MINIMAL_JOB, MINIMAL_SCRIPT) if minimal else (JOB_TEMPLATE, SCRIPT_TEMPLATE)
    files = {Path(folder) / "job.yaml": job, Path(folder) / "train.py": script}
    there = [str(path) for path in files if path.exists()]
    if there and not force:
        raise UsageError(f"{' and '.join(there)} exist{'s' * (len(there) == 1)} already", fix="--force overwrites")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
            render.talk(f"wrote {path}")
        _ignore(Path(folder) / ".gitignore")
    except OSError as error:
        raise UsageError(f"cannot write into {folder}", why=error.strerror) from error
    render.talk("next: allranks run" + ("" if folder == "." else f" {shlex.quote(str(Path(folder) / 'job.yaml'))}"))
    return 0


def _ignore(path: Path) -> None:
    """Have git ignore what runs leave: a file that exists belongs to the user, and only gets the missing lines."""
    from allranks.job.template import IGNORED

    # Bytes that are no UTF-8 stay as they are: lines are only added.
    before = path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""
    # /runs, runs and runs/ all ignore it; "!runs" says that the user wants it in git.
    there = {line.strip().lstrip("!").strip("/") for line in before.splitlines()}
    missing = [line for line in IGNORED if line.strip("/") not in there]
    if not missing:
        return
    ending = "\n" * (before[-1:] not in ("", "\n"))
    with path.open("a", encoding="utf-8") as file:
        file.write(ending + "".join(f"{line}\n" for line in missing))
    render.talk(f"added {', '.join(missing)} to {path}" if before else f"wrote {path}")
