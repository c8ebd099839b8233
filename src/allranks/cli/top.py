"""``allranks top``: what a run uses of its nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import click

from allranks.cli import render
from allranks.cli.runs import json_option, run_arguments, runs_folder
from allranks.job.units import format_size
from allranks.runs.record import Run, find
from allranks.runs.usage import NodeUsage, read_usage

_HEADER = ("NODE", "CPUS", "MEMORY", "GPU", "BUSY", "GPU MEMORY", "SEEN")
_SECONDS = 2.0


@click.command("top")
@run_arguments
@click.option("--once", is_flag=True, help="Show it once; without a terminal it is shown once anyway.")
@json_option
def command(run: str | None, runs_folder_: str | None, once: bool, as_json: bool) -> int:
    """Show what a run uses of its nodes, CPUs and GPUs: the newest here, or RUN. Ctrl-C ends it."""
    from allranks.clusters.registry import load_kind
    from allranks.clusters.settle import settled

    found = find(runs_folder(runs_folder_), run)
    kind = load_kind(found.record.kind)  # One object: it knows how often its cluster may be asked.
    found = settled(found, kind)
    if as_json:
        render.as_json(
            [{**usage.to_json(), "time": render.iso(usage.time)} for usage in read_usage(found.attempt_folder)]
        )
        return 0
    if once or not render.is_lively(sys.stdout) or found.record.status.state.is_final:
        render.data(_text(found))
    else:
        while not found.record.status.state.is_final:
            render.frame(_text(found))
            time.sleep(_SECONDS)
            found = settled(found, kind)
    status = found.record.status
    if status.state.is_final:
        when = f", {render.age(status.ended)}" if status.ended else ""
        render.talk(f"{found.record.id} has ended: {status.state.value}{when}")
    return 0


def _text(run: Run) -> str:
    rows = [row for usage in read_usage(run.attempt_folder) for row in _rows(usage)]
    if not rows:
        return f"{run.record.id} {run.record.status.state.value}: nothing has been seen of its nodes yet"
    return render.table(_HEADER, rows)


def _rows(usage: NodeUsage) -> Iterator[tuple[str, ...]]:
    node = f"{usage.node} {usage.host}".rstrip()
    seen = f"{render.seconds(max(0.0, time.time() - usage.time))} ago"
    used = (node, f"{usage.cpus:.1f}", format_size(usage.memory))
    gpus = [
        (str(number), f"{gpu.busy} %", f"{format_size(gpu.memory)} of {format_size(gpu.total)}")
        for number, gpu in enumerate(usage.gpus)
    ]
    first, *others = gpus or [("-", "-", "-")]
    yield (*used, *first, seen)
    yield from (("", "", "", *other, "") for other in others)
