"""``allranks compare``: what differs between runs, in their settings and in their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from allranks.cli import render
from allranks.cli.runs import complete_run, find_each, folder_option, json_option
from allranks.errors import UsageError
from allranks.job.units import format_count, format_hours, format_number, format_seconds
from allranks.runs.code import code_of, differing_files
from allranks.runs.comparison import Compared, common_end, different, names_of, rank_hours, read
from allranks.runs.metrics import speeds, values_until
from allranks.runs.record import Run

_MOST_FILES = 6


@click.command("compare")
@click.argument("names", nargs=-1, metavar="RUN RUN...", shell_complete=complete_run)
@folder_option
@json_option
def command(names: tuple[str, ...], folder: str | None, as_json: bool) -> int:
    """Compare runs: time, speed, metrics at equal steps and at equal times, and the settings that differ.

    Ratios are to the first run. Metrics are those of metrics.jsonl, which ctx.metrics.log writes; speeds are medians.
    """
    if len(names) < 2:
        raise UsageError("compare needs two runs or more", fix="allranks compare RUN RUN; allranks ps lists them")
    runs = find_each(folder, names)
    compared = [read(run) for run in runs]
    step, seconds = common_end(compared)
    at_step = [values_until(each.metrics, step=step) for each in compared]
    at_time = [values_until(each.metrics, time=each.start + seconds) for each in compared]
    if as_json:
        render.as_json(_to_json(compared, step, at_step, seconds, at_time))
        return 0
    settings = different(compared)
    values = [*_values(f"at step {step}", at_step), *_values(f"after {format_seconds(seconds)}", at_time)]
    between = [("",) * (1 + len(runs))]
    rows = [*_results(compared), *(between if values else ()), *values, *(between if settings else ()), *settings]
    render.data(render.table(("", *(run.record.id for run in runs)), rows), cut=True)
    for run in (each.run for each in compared if not each.metrics):
        why = "tasks of an array are not compared" if run.tasks else "its script does not call ctx.metrics.log"
        render.talk(f"allranks: note: {run.record.id} has no metrics: {why}")
    for line in _code(compared):
        render.talk(f"allranks: {line}")
    if not settings:
        render.talk("allranks: note: the job files and flags of these runs are the same")
    return 0


def _code(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield how the code of the others differs from that of the first run."""
    first, *others = (code_of(each.run) for each in compared)
    for each, other in zip(compared[1:], others, strict=True):
        if first and other and str(first) != str(other) and (files := differing_files(first, other)):
            more = f" and {len(files) - _MOST_FILES} more" if len(files) > _MOST_FILES else ""
            names = ", ".join(files[:_MOST_FILES])
            verb = "differs" if len(files) == 1 else "differ"
            yield f"code: {format_count(len(files), 'file')} of {each.run.record.id} {verb}: {names}{more}"


def _results(compared: Sequence[Compared]) -> Iterator[tuple[str, ...]]:
    def sizes(run: Run) -> str:
        return f"{format_count(run.world_size, 'rank')} on {format_count(run.record.nnodes, 'node')}"

    yield "state", *(render.state(each.run.record.status.state) for each in compared)
    yield "attempts", *(str(each.run.attempt + 1) for each in compared)
    yield "ranks", *(sizes(each.run) for each in compared)
    took = [each.seconds for each in compared]
    yield "took", *_with_ratios(took, format_seconds)
    yield "time of all ranks", *_with_ratios([rank_hours(each.run) for each in compared], format_hours)
    yield "steps", *(str(each.metrics[-1].step) if each.metrics else "-" for each in compared)
    rates = [speeds(each.metrics) for each in compared]
    for name in names_of(rates):
        yield name.replace("_per_second", "/s"), *_with_ratios([rate.get(name) for rate in rates])


def _values(where: str, values: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, ...]]:
    for name in names_of(values):
        yield f"{name} {where}", *("-" if name not in each else format_number(each[name]) for each in values)


def _with_ratios(numbers: Sequence[float | None], write: Any = format_number) -> Iterator[str]:
    first = numbers[0]
    for at, number in enumerate(numbers):
        ratio = f" ({number / first:.2f}x)" if at and number is not None and first else ""
        yield "-" if number is None else write(number) + ratio


def _to_json(
    compared: Sequence[Compared],
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
            "rank_hours": rank_hours(each.run),
            "steps": each.metrics[-1].step if each.metrics else None,
            "speeds": speeds(each.metrics),
            "at_step": at_step[at],
            "at_time": at_time[at],
        }
        for at, each in enumerate(compared)
    ]
    settings = {name: values for name, *values in different(compared)}
    return {"step": step, "seconds": seconds, "runs": runs, "settings": settings}
