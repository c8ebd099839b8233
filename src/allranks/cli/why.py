"""``allranks why``: why a run failed, or what any logs say."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from allranks.cli import render
from allranks.cli.runs import folder_option, json_option, name_to_type, runs_folder
from allranks.diagnosis.model import Diagnosis, Line
from allranks.errors import RunNotFoundError, UsageError

#: Characters of a line that are shown as evidence.
_LONG = 200


@click.command("why")
@click.argument("targets", nargs=-1, metavar="[RUN | FILE… | DIRECTORY | -]")
@folder_option
@json_option
def command(targets: tuple[str, ...], folder: str | None, as_json: bool) -> int:
    """Explain why a run failed: what failed first, the cause, the evidence and what to do.

    \b
    allranks why                       the newest run here
    allranks why train-0131-1400       this run: its id, the beginning of it, or its directory
    allranks why slurm-4242.out        any log of PyTorch, whatever started it
    allranks why logs/                 all logs of a directory, as torchrun --log-dir writes them
    python train.py 2>&1 | allranks why -

    Exits with 0 even if the cause is unknown.
    """
    from allranks.diagnosis import sources

    if targets == ("-",):
        verdict, name = sources.of_text(sys.stdin.buffer.read()), "stdin"
    elif targets and all(_is_log(target) for target in targets):
        verdict, name = sources.of_files([Path(target) for target in targets]), ", ".join(targets)
    elif len(targets) > 1:
        missing = next(target for target in targets if not _is_log(target))
        raise UsageError(
            f"there is no file {missing}", why="with several arguments, each must be a log", fix="one run, or files"
        )
    else:
        return _of_run(targets[0] if targets else None, folder, as_json)
    _show(verdict, name, "RUN", as_json)
    return 0


def _is_log(target: str) -> bool:
    """Return whether an argument is a file or directory, and not a run."""
    return Path(target).exists() and not (Path(target) / "record.json").exists()


def _of_run(name: str | None, folder: str | None, as_json: bool) -> int:
    from allranks.diagnosis.hangs import verdict
    from allranks.launch.refresh import settled
    from allranks.launch.verdict import judged
    from allranks.runs.hangs import newest
    from allranks.runs.record import find, run_ids
    from allranks.runs.status import State

    place = runs_folder(folder)
    try:
        found = find(place, name)
    except RunNotFoundError as missing:
        if name is None or any(run_id.startswith(name) for run_id in run_ids(place)):
            raise
        why = None if os.sep in name else missing.why
        raise RunNotFoundError(f"{name} is neither a run nor a file", why=why, fix=missing.fix) from missing
    run = settled(found)
    state = run.record.status.state
    hang = newest(run.attempt_folder) if state is State.RUNNING else None
    if hang:
        _show(verdict(hang), run.record.id, name_to_type(run), as_json)
        return 0
    if state is State.SUCCEEDED or not state.is_final:
        word = "succeeded" if state is State.SUCCEEDED else "has not ended"
        if as_json:
            render.as_json({"state": state.value, "diagnosis": None})
        else:
            render.talk(f"allranks: {run.record.id} {word}: there is no failure to explain")
        return 0
    _show(judged(run), run.record.id, name_to_type(run), as_json)
    return 0


def _show(verdict: Diagnosis | None, name: str, run: str, as_json: bool) -> None:
    if as_json:
        render.as_json({"diagnosis": asdict(verdict) if verdict else None})
    elif verdict is None:
        render.data(f"cause   unknown: no line of {name} tells of a failure")
        render.talk("next: look at what it printed last, and give all of its logs, those of the scheduler too")
    else:
        render.data("\n".join(_lines(verdict, run)))


def _lines(verdict: Diagnosis, run: str) -> list[str]:
    first = f"rank {verdict.rank}" if verdict.rank is not None else ""
    first += f" on {verdict.host}" if verdict.host else ""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(verdict.when)) if verdict.when else ""
    first = ", ".join(filter(None, (first, when)))
    place = f" ({verdict.place})" if verdict.place else ""
    cause = f"unknown: {verdict.cause}" if verdict.sure == "unknown" else verdict.cause
    rows = [("hangs" if verdict.id.startswith("hang") else "failed", first), ("cause", cause + place)]
    for line in verdict.evidence[:2]:
        text = render.one_line(line.text)
        rows += [("see", _where(line)), ("", text if len(text) <= _LONG else f"{text[:_LONG]} …")]
    rows += [
        ("follows", verdict.followed),
        ("fix", verdict.fix.replace("RUN", run)),
        ("retry", render.RETRY.get(verdict.retry, "")),
        ("sure", f"{verdict.sure} ({verdict.id})" if verdict.id else ""),
    ]
    return [render.wrapped(f"{label:8}", text) for label, text in rows if text]


def _where(line: Line) -> str:
    if line.file == "-":
        return f"line {line.number} of stdin"
    shown = render.path(Path(os.path.abspath(line.file)))  # noqa: PTH100 - a link keeps its name
    return f"{shown}:{line.number}" if line.number > 0 else f"{shown}, line {-line.number} from its end"
