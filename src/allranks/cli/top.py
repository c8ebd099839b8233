"""``allranks top``: what a run uses of its nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import click

from allranks.cli import render
from allranks.cli.runs import find_unfinished, json_option, run_arguments
from allranks.job.units import format_seconds, format_size
from allranks.runs.hangs import quiet_for, span
from allranks.runs.record import Run
from allranks.runs.status import State
from allranks.runs.usage import clock, node_usage

_HEADER = ("NODE", "CPUS", "MEMORY", "GPU", "BUSY", "GPU MEMORY", "CLOCK", "TEMP", "SEEN")
_SECONDS = 2.0


@click.command("top")
@run_arguments
@click.option("--once", is_flag=True, help="Show it once; without a terminal it is shown once anyway.")
@json_option
def command(run: str | None, folder: str | None, once: bool, as_json: bool) -> int:
    """Show what a run uses of its nodes, CPUs and GPUs: the newest here that has not ended, or RUN. Ctrl-C ends it."""
    from allranks.clusters.registry import load_kind
    from allranks.launch.refresh import settled

    found = find_unfinished(folder, run)
    kind = load_kind(found.record.kind)  # One object: it limits how often its cluster is queried.
    found = settled(found, kind)
    if as_json:
        render.as_json([{**usage, "time": render.iso(usage["time"])} for usage in node_usage(found.attempt_folder)])
        return 0
    if once or not render.is_lively(sys.stdout) or found.record.status.state.is_final:
        render.data(_text(found))
    else:

        def texts() -> Iterator[str]:
            nonlocal found
            while not found.record.status.state.is_final:
                yield _text(found)
                time.sleep(_SECONDS)
                found = settled(found, kind)

        render.frames(texts())
    status = found.record.status
    if status.state.is_final:
        when = f", {render.age(status.ended)}" if status.ended else ""
        render.talk(f"{found.record.id} has already ended: {status.state.value}{when}")
    return 0


def _text(run: Run) -> str:
    rows = []
    for node in node_usage(run.attempt_folder):
        seen = f"{format_seconds(max(0.0, time.time() - node['time']))} ago"
        used = (f"{node['node']} {node['host']}".rstrip(), f"{node['cpus']:.1f}", format_size(node["memory"]))
        for number, gpu in enumerate(node["gpus"]):
            memory = f"{format_size(gpu['memory'])} of {format_size(gpu['total'])}"
            heat = f"{gpu['temperature']} °C" if gpu["temperature"] else "-"
            own = (str(gpu["number"]), f"{gpu['busy']} %", memory, clock(gpu) or "-", heat)
            rows.append((*(("", "", "") if number else used), *own, seen))
            seen = ""
        if not node["gpus"]:
            rows.append((*used, *("-",) * 5, seen))
    if not rows and run.record.status.state.is_final:
        return f"{run.record.id}: it ended before its first sample"
    if not rows:
        return f"{run.record.id} {run.record.status.state.value}: nothing has been seen of its nodes yet"
    is_running = run.record.status.state is State.RUNNING
    quiet = quiet_for(run.attempt_folder) if is_running else None
    return render.table(_HEADER, rows) + (f"\nno step for {span(quiet)}" if quiet else "")
