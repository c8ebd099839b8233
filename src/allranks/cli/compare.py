"""``allranks compare``: what differs between runs, in their settings and in their results."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from allranks import contract
from allranks.cli import render
from allranks.cli.runs import complete_run, folder_option, json_option, runs_folder
from allranks.errors import UsageError
from allranks.job.units import format_count
from allranks.runs import agents
from allranks.runs.metrics import MetricLine, read_metrics, speeds, values_until
from allranks.runs.record import Run, find

#: Keys of a job that say where a run is kept, and not how it trains.
_OF_NO_RESULT = ("name", "runs.folder", "runs.group_readable")


@dataclass(frozen=True)
class _Compared:
    """A run with what it is compared by.

    Attributes:
        start: when its ranks started first, in seconds since 1970.
        settings: its job as it ran, by the names of the job file; flags of the script by their own.
    """

    run: Run
    start: float
    metrics: list[MetricLine]
    settings: Mapping[str, str]

    @property
    def seconds(self) -> float | None:
        """How long it took from its first start to its end; None while it runs."""
        ended = self.run.record.status.ended
        return ended - self.start if ended else None


@click.command("compare")
@click.argument("names", nargs=-1, metavar="RUN RUN...", shell_complete=complete_run)
@folder_option
@json_option
def command(names: tuple[str, ...], folder: str | None, as_json: bool) -> int:
    """Compare runs: time, speed, metrics at equal steps and at equal times, and the settings that differ.

    Ratios are to the first run. Metrics are those of metrics.jsonl, which ctx.metrics.log writes; speeds are medians.
    """
    from allranks.launch.refresh import settled

    if len(names) < 2:
        raise UsageError("compare needs two runs or more", fix="allranks ps lists them")
    runs = [settled(find(runs_folder(folder), name)) for name in names]
    twice = [run.record.id for run in runs if runs.count(run) > 1]
    if twice:
        raise UsageError(f"{twice[0]} is given twice", fix="name two different runs; allranks ps lists them")
    compared = [_read(run) for run in runs]
    step, seconds = _common_end(compared)
    at_step = [values_until(each.metrics, step=step) for each in compared]
    at_time = [values_until(each.metrics, time=each.start + seconds) for each in compared]
    if as_json:
        render.as_json(_to_json(compared, step, at_step, seconds, at_time))
        return 0
    settings = _different(compared)
    values = [*_values(f"at step {step}", at_step), *_values(f"after {render.seconds(seconds)}", at_time)]
    between = [("",) * (1 + len(runs))]
    rows = [*_results(compared), *(between if values else ()), *values, *(between if settings else ()), *settings]
    render.data(render.table(("", *(run.record.id for run in runs)), rows), cut=True)
    for run in (each.run for each in compared if not each.metrics):
        why = "tasks of an array are not compared" if run.tasks else "its script does not call ctx.metrics.log"
        render.talk(f"allranks: note: {run.record.id} has no metrics: {why}")
    if not settings:
        render.talk("allranks: note: the job files and flags of these runs are the same")
    return 0


def _read(run: Run) -> _Compared:
    start = agents.began(run) or run.record.status.started or run.record.created
    return _Compared(run, start, read_metrics(run.folder), _settings(run.folder / contract.JOB_FILE))


def _settings(path: Path) -> dict[str, str]:
    """Return the keys of a run's job file with their values as text."""
    from allranks.job.files import read_job_file  # It imports pydantic, which the help does not need.

    job = read_job_file(path, Path.cwd())
    flags = _flags(job.pop("args", None) or [])
    return {**dict(_flat(job, "")), **flags}


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else key)
    elif name not in _OF_NO_RESULT:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else "-" if value is None else str(value)


def _flags(args: Sequence[str]) -> dict[str, str]:
    """Return a script's arguments by flag, with the values that follow each; what stands before them is ``args``."""
    found: dict[str, list[str]] = {}
    name = "args"
    for word in args:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found.setdefault(name, []).extend([value] if value else [])
        else:
            found.setdefault(name, []).append(word)
    return {name: shlex.join(values) or "yes" for name, values in found.items()}


def _common_end(compared: Sequence[_Compared]) -> tuple[int, float]:
    """Return the last step, and the last time in seconds after the start, that all runs with metrics have reached."""
    with_metrics = [each for each in compared if each.metrics]
    steps = [each.metrics[-1].step for each in with_metrics]
    seconds = [each.metrics[-1].time - each.start for each in with_metrics]
    return min(steps, default=0), max(0.0, min(seconds, default=0.0))


def _results(compared: Sequence[_Compared]) -> Iterator[tuple[str, ...]]:
    def sizes(run: Run) -> str:
        return f"{format_count(run.world_size, 'rank')} on {format_count(run.record.nnodes, 'node')}"

    yield "state", *(render.state(each.run.record.status.state) for each in compared)
    yield "attempts", *(str(each.run.attempt + 1) for each in compared)
    yield "ranks", *(sizes(each.run) for each in compared)
    took = [each.seconds for each in compared]
    yield "took", *_with_ratios(took, render.seconds)
    yield "rank hours", *_with_ratios([_rank_hours(each.run) for each in compared])
    yield "steps", *(str(each.metrics[-1].step) if each.metrics else "-" for each in compared)
    rates = [speeds(each.metrics) for each in compared]
    for name in _names(rates):
        yield name.replace("_per_second", "/s"), *_with_ratios([rate.get(name) for rate in rates])


def _rank_hours(run: Run) -> float | None:
    """Return the hours of all ranks in all attempts, without the waits between; None if the end of one is not known."""
    seconds = 0.0
    for number in range(run.attempt + 1):
        folder = run.folder / contract.attempt_dir(number)
        status, (ranks, _) = agents.reported_by_all(folder), agents.size(folder) or (run.world_size, 1)
        if not (status.started and status.ended):
            return None
        seconds += (status.ended - status.started) * ranks
    return seconds / 3600


def _values(where: str, values: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, ...]]:
    for name in _names(values):
        yield f"{name} {where}", *("-" if name not in each else f"{each[name]:.4g}" for each in values)


def _names(values: Iterable[Mapping[str, object]]) -> list[str]:
    """Return all names, in the order in which they come first."""
    return [*dict.fromkeys(name for each in values for name in each)]


def _with_ratios(numbers: Sequence[float | None], write: Any = "{:.4g}".format) -> Iterator[str]:
    first = numbers[0]
    for at, number in enumerate(numbers):
        ratio = f" ({number / first:.2f}x)" if at and number is not None and first else ""
        yield "-" if number is None else write(number) + ratio


def _different(compared: Sequence[_Compared]) -> list[tuple[str, ...]]:
    """Return the settings that are not the same in all runs."""
    every = [each.settings for each in compared]
    rows = [(name, *(each.get(name, "-") for each in every)) for name in _names(every)]
    return [row for row in rows if len({*row[1:]}) > 1]


def _to_json(
    compared: Sequence[_Compared],
    step: int,
    at_step: Sequence[Mapping[str, float]],
    seconds: float,
    at_time: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    runs = [
        {
            "id": each.run.record.id,
            "state": each.run.record.status.state.value,
            "attempts": each.run.attempt + 1,
            "ranks": each.run.world_size,
            "nodes": each.run.record.nnodes,
            "seconds": each.seconds,
            "rank_hours": _rank_hours(each.run),
            "steps": each.metrics[-1].step if each.metrics else None,
            "speeds": speeds(each.metrics),
            "at_step": at_step[at],
            "at_time": at_time[at],
        }
        for at, each in enumerate(compared)
    ]
    settings = {name: values for name, *values in _different(compared)}
    return {"step": step, "seconds": seconds, "runs": runs, "settings": settings}
