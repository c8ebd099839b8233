"""``allranks report``: runs as plain JSON, and the page that shows it."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from allranks import __version__, contract
from allranks.job.units import format_number, format_seconds
from allranks.launch.verdict import has_failed, verdict_on
from allranks.record.events import read_saves
from allranks.record.steptime import PHASES
from allranks.record.usage import MEASURES, Row, read_history
from allranks.runs.comparison import Compared, different, names_of, rank_hours
from allranks.runs.metrics import MetricLine, speeds
from allranks.runs.record import Run
from allranks.runs.usage import node_usage
from allranks.view.steptime import repeated, step_times
from allranks.view.timeline import attempts_of

#: Points of a curve: more than a screen has columns, and little for a file.
MOST_POINTS = 1000
_MOST_ADVICE = 3
#: Records of which the last quarter is more than noise.
_FEWEST = 20
_HOUR = 3600.0
#: A phase that takes so much more of the ranks' time than in the smallest run limits the scaling.
_MUCH_GROWN = 0.02
#: Points of a curve of what nodes used; nodes that have a curve each, of more there are mean, lowest and highest.
_POINTS_OF_NODES, _FEW_NODES = 240, 4
#: The curves in their order: title, and by how much values are multiplied.
_USAGE = {
    "gpu": ("GPU use, %", 100.0),
    "gpu_memory": ("GPU memory, GB", 1e-9),
    "cpus": ("CPUs busy", 1.0),
    "memory": ("memory, GB", 1e-9),
    "net_in": ("network in, MB/s", 1e-6),
    "net_out": ("network out, MB/s", 1e-6),
    "disk_read": ("disk read, MB/s", 1e-6),
    "disk_write": ("disk written, MB/s", 1e-6),
}
_OF_NODES: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "lowest": min, "highest": max}


def to_page(data: dict[str, Any]) -> str:
    """Return a self-contained HTML file that shows the data."""
    page = files("allranks.view").joinpath("report.html").read_text(encoding="utf-8")
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # Only "<" in the JSON could end the surrounding element.
    return page.replace("{{data}}", text.replace("<", r"\u003c"))


def to_data(compared: Sequence[Compared]) -> dict[str, Any]:
    """Return the data of a report on runs. Times are seconds since 1970, durations are seconds.

    Raises:
        RunFolderError: a log of a failed run cannot be read.
    """
    settings = different(compared)
    if len(compared) == 1:
        settings = [(name, value) for name, value in compared[0].settings.items() if value != "-"]
    runs = [_run(each) for each in compared]
    return {
        "version": __version__,
        "runs": runs,
        "settings": settings,
        "curves": _curves(compared),
        "scaling": _scaling(runs),
    }


def _run(compared: Compared) -> dict[str, Any]:
    run, record = compared.run, compared.run.record
    status, attempts = record.status, attempts_of(run)
    verdict = verdict_on(run) if has_failed(run) else None
    saved = [save for save in read_saves(run.folder) if save.path]
    times, slow = step_times(run)
    spent = defaultdict[str, float](float)
    for phase in (phase for attempt in attempts for phase in attempt.phases):
        spent[phase.kind] += phase.end - phase.start
    return {
        "id": record.id,
        "state": status.state.value,
        "reason": status.cause or status.reason,
        "command": run.command,
        "folder": str(run.folder),
        "cluster": record.cluster,
        "kind": record.kind,
        "ranks": run.world_size,
        "nodes": record.nnodes,
        "created": record.created,
        "ended": status.ended,
        "took": (status.ended or time.time()) - record.created,
        "rank_hours": None if run.tasks else rank_hours(run),
        "steps": compared.metrics[-1].step if compared.metrics else None,
        "speeds": speeds(compared.metrics),
        "checkpoints": len(saved),
        "last_checkpoint": saved[-1].step if saved else None,
        "spent": dict(spent),
        "lost": {} if run.tasks else _lost(run, spent["running"], times),
        "verdict": asdict(verdict) if verdict else None,
        "advice": [*slow, *_advice(compared, spent, len(saved))][:_MOST_ADVICE],
        "attempts": [{**asdict(attempt), "state": attempt.state.value} for attempt in attempts],
        "usage": [*node_usage(run.attempt_folder)],
        "usage_curves": usage_over_time(run.attempt_folder),
        "step_times": times,
    }


def _lost(run: Run, running: float, times: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the seconds of running without training, by cause; time lost to stragglers is part of the waits.

    Waits are assumed to be the same part of all attempts as of the newest one.
    """
    if not times:
        return {}
    parts = {phase: running * spent / sum(times["mean"]) for phase, spent in zip(PHASES, times["mean"], strict=True)}
    return {
        "repeated steps": repeated(run),
        "waiting for data": parts["data"],
        "waiting for other ranks": parts["exchange"],
        "part of it for stragglers": min(times["late"], running),
    }


def _advice(compared: Compared, spent: Mapping[str, float], saves: int) -> list[str]:
    """Return advice with its numbers, most important first."""
    found = []
    whole = sum(spent.values())
    if compared.run.job_id and spent["waiting"] > max(0.2 * whole, 60):
        found.append(
            f"It waited {format_seconds(spent['waiting'])} of {format_seconds(whole)} in the queue: with a shorter "
            "time limit, or fewer nodes, most schedulers start a job sooner."
        )
    began = spent["starting"] + spent["restarting"]
    if began > max(0.1 * whole, 60):
        found.append(
            f"Starting and restarting took {format_seconds(began)} of {format_seconds(whole)}: allranks check --full "
            "measures what the nodes and the shared directory need for it."
        )
    if spent["running"] > _HOUR and not saves:
        found.append(
            f"No checkpoint was saved in {format_seconds(spent['running'])}: a failure costs all of it. "
            "ctx.checkpoints saves and resumes."
        )
    return found + _slowdowns(compared.metrics)


def _slowdowns(lines: Sequence[MetricLine]) -> list[str]:
    """Return a sentence if the last quarter of the steps was much slower than those before."""
    cut = len(lines) * 3 // 4
    before, after = speeds([*lines[:cut]]), speeds([*lines[cut:]])
    name = next((name for name in before if name in after), None)
    if len(lines) < _FEWEST or name is None or after[name] >= 0.8 * before[name]:
        return []
    unit = name.replace("_per_second", "/s")
    return [
        f"The last quarter was slower: {format_number(after[name])} {unit} after {format_number(before[name])} {unit}. "
        "allranks top shows what the nodes do while it runs."
    ]


def _curves(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return the curve of each metric: of each run that has it, steps, seconds since its start, and values."""
    curves = []
    for name in names_of(line.values for each in compared for line in each.metrics):
        series = []
        for number, each in enumerate(compared):
            lines = [line for line in each.metrics if name in line.values]
            kept = [lines[at] for at in thinned([line.values[name] for line in lines], MOST_POINTS)]
            if kept:
                steps, seconds = [line.step for line in kept], [round(line.time - each.start, 3) for line in kept]
                values = [float(f"{line.values[name]:.6g}") for line in kept]
                series.append({"run": number, "steps": steps, "seconds": seconds, "values": values})
        curves.append({"name": name, "series": series})
    return curves


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Return at most ``most`` indices, ascending, with the first, the last, and the extremes of values between."""
    if len(values) <= most:
        return [*range(len(values))]
    parts = (most - 2) // 2
    kept = {0, len(values) - 1}
    for part in range(parts):
        span = range(len(values) * part // parts, len(values) * (part + 1) // parts)
        kept |= {min(span, key=values.__getitem__), max(span, key=values.__getitem__)}
    return sorted(kept)


def _scaling(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return speeds with speed-up and efficiency, relative to the run of fewest ranks; None if all have as many."""
    names = [name for name in runs[0]["speeds"] if all(name in run["speeds"] for run in runs)]
    if not names or len({run["ranks"] for run in runs}) < 2:
        return None
    name = names[-1]  # Of steps and samples per second the latter, whatever the batch.
    ordered = sorted(range(len(runs)), key=lambda at: int(runs[at]["ranks"]))
    least = runs[ordered[0]]
    rows = []
    for at in ordered:
        ranks, speed = runs[at]["ranks"], runs[at]["speeds"][name]
        speedup = speed / least["speeds"][name]
        efficiency = speedup / (ranks / least["ranks"])
        row = {"run": at, "ranks": ranks, "speed": speed, "speedup": speedup, "efficiency": efficiency}
        rows.append({**row, "limit": _limit(runs[at], least, name)})
    return {"name": name, "rows": rows}


def _limit(run: Mapping[str, Any], least: Mapping[str, Any], name: str) -> tuple[str, float] | None:
    """Return the phase whose rank-time for the same work grew most against run ``least``, and its relative growth."""

    def spent(one: Mapping[str, Any]) -> list[float]:
        mean = one["step_times"]["mean"]
        return [part / sum(mean) * one["ranks"] / one["speeds"][name] for part in mean]

    if not (run["step_times"] and least["step_times"]):
        return None
    before = spent(least)
    grown = [(now - then) / sum(before) for now, then in zip(spent(run), before, strict=True)]
    most = max(range(len(grown)), key=grown.__getitem__)
    return (PHASES[most], round(grown[most], 3)) if grown[most] >= _MUCH_GROWN else None


# --- what nodes used ---


def usage_over_time(attempt: Path) -> list[dict[str, Any]]:
    """Return the curves of an attempt's nodes, by seconds since the first sample; none if there are no samples."""
    paths = sorted(attempt.glob(f"node-*/{contract.USAGE_HISTORY}"))
    nodes = {path.parent.name.removeprefix("node-").lstrip("0") or "0": read_history(path) for path in paths}
    nodes = {name: rows for name, rows in nodes.items() if len(rows) > 1}
    if not nodes:
        return []
    start, end = min(rows[0][0] for rows in nodes.values()), max(rows[-1][0] for rows in nodes.values())
    count = min(_POINTS_OF_NODES, max(map(len, nodes.values())))
    width = max(end - start, 1e-9) / count
    curves = []
    for measure, (title, factor) in _USAGE.items():
        column = MEASURES.index(measure) + 1
        found = {name: _points(rows, column, start, width, count) for name, rows in nodes.items()}
        found = {name: points for name, points in found.items() if points}
        if not found:
            continue
        series = {f"node {name}": points for name, points in found.items()}
        if len(found) > _FEW_NODES:
            series = {name: _together([*found.values()], of) for name, of in _OF_NODES.items()}
        lines = []
        for at, (name, points) in enumerate(series.items()):
            seconds = [round((point + 0.5) * width, 1) for point in sorted(points)]
            values = [float(f"{points[point] * factor:.4g}") for point in sorted(points)]
            lines.append({"name": name, "run": at, "seconds": seconds, "values": values})
        curves.append({"name": title, "series": lines})
    return curves


def _points(rows: Sequence[Row], column: int, start: float, width: float, count: int) -> dict[int, float]:
    """Return the mean of what is known in each of so many spans of time, by their number."""
    spans = dict[int, list[float]]()
    for row in rows:
        if math.isfinite(row[column]):
            spans.setdefault(min(count - 1, int((row[0] - start) / width)), []).append(row[column])
    return {span: statistics.fmean(values) for span, values in spans.items()}


def _together(nodes: Sequence[Mapping[int, float]], of: Callable[[Sequence[float]], float]) -> dict[int, float]:
    """Return one value for all nodes in each span of time."""
    spans = {span for points in nodes for span in points}
    return {span: of([points[span] for points in nodes if span in points]) for span in spans}
