"""Step times of a run: per rank, as a heat map over time, and as advice."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from operator import add, sub
from typing import Any

from allranks.contract import attempt_dir
from allranks.job.units import format_span
from allranks.record.steptime import PHASES, Window
from allranks.runs.record import Run
from allranks.runs.steptime import RankTimes, cumulated, differences, of_start, read
from allranks.runs.stragglers import explained, find
from allranks.runs.usage import Workers, node_usage, workers_of

#: Ranks that have a bar of their own; of more, those whose own time is longest.
MOST_BARS = 32
#: Rows and columns of the heat map; of more ranks, neighbours share a row, which shows the slowest of them.
MOST_ROWS, MOST_COLUMNS = 64, 120
#: Of the step, so much of it for data is worth a sentence.
_MUCH_DATA = 0.2
_DATA, _EXCHANGE = PHASES.index("data"), PHASES.index("exchange")
_FIXES = {
    "compute": "allranks top shows what its node does, and allranks check --full compares the nodes.",
    "data": "More workers for the loader, or faster storage, would help.",
    "exchange": "allranks check --full measures the links between the nodes.",
    "clock": "nvidia-smi -q -d PERFORMANCE on its node shows why: see to cooling and power.",
    "checkpoint": "A faster directory for the checkpoints, or fewer of them, would help.",
}


def step_times(run: Run) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the step times of the newest attempt's ranks (None if not recorded), and advice."""
    ranks = read(run.attempt_folder)
    if not ranks:
        return None, _advice(run, [], [])[0]
    means = [_mean(each.windows) for each in ranks]
    own = [sum(phases) - phases[_EXCHANGE] for phases in means]
    shown = sorted(sorted(range(len(ranks)), key=lambda at: -own[at])[: MOST_BARS if len(ranks) > MOST_BARS else None])
    bars = [{"name": f"rank {ranks[at].rank}", "spent": [*map(_rounded, means[at])]} for at in shown]
    if len(shown) < len(ranks):
        median = [statistics.median(phases) for phases in zip(*means, strict=True)]
        bars.insert(0, {"name": f"median of {len(ranks)}", "spent": [*map(_rounded, median)]})
    advice, late = _advice(run, ranks, means)
    mean = [statistics.fmean(phases) for phases in zip(*means, strict=True)]
    return {"phases": PHASES, "mean": mean, "late": late, "bars": bars, "heat": _heat(ranks)}, advice


def repeated(run: Run) -> float:
    """Return the seconds of steps that had to be repeated after a restart."""
    seconds, until, end, start = 0.0, 0, 0, (0, 0)
    for attempt in range(run.attempt + 1):
        for window in (one for rank in read(run.folder / attempt_dir(attempt), rank=0) for one in rank.windows):
            if start != (attempt, window.restart):
                start, until = (attempt, window.restart), end
            elif window.first < end:  # A second training, which counts from 0 again.
                until = 0
            again = min(until, window.first + window.steps) - window.first
            seconds += window.seconds * max(0, again) / window.steps
            end = window.first + window.steps
    return seconds


def _mean(windows: Iterable[Window]) -> list[float]:
    """Return the seconds a step in each phase."""
    steps = sum(one.steps for one in windows)
    return [sum(seconds) / steps for seconds in zip(*(one.spent for one in windows), strict=True)]


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


# --- the heat map ---


def _heat(ranks: Sequence[RankTimes]) -> dict[str, Any]:
    """Return seconds a step by rows of ranks and columns of time: of each rank's own, of the step, and for data."""
    start = min(each.windows[0].start for each in ranks)
    end = max(each.windows[-1].start + each.windows[-1].seconds for each in ranks)
    columns = min(MOST_COLUMNS, max(len(each.windows) for each in ranks))
    per_row = -(-len(ranks) // MOST_ROWS)
    rows = [ranks[at : at + per_row] for at in range(0, len(ranks), per_row)]
    cells: dict[str, list[list[float | None]]] = {"own": [], "step": [], "data": []}
    for row in rows:
        found = [_columns(each.windows, start, (end - start) / columns, columns) for each in row]
        for at, kind in enumerate(cells.values()):
            kind.append([_slowest(column, at) for column in zip(*found, strict=True)])
    return {"start": start, "end": end, "rows": [_name(row) for row in rows], **cells}


def _slowest(ranks: Iterable[Sequence[float] | None], kind: int) -> float | None:
    """Return the largest value of a kind over the ranks that have made a step; None if none has."""
    known = [each[kind] for each in ranks if each]
    return _rounded(max(known)) if known else None


def _columns(windows: Sequence[Window], start: float, width: float, columns: int) -> list[list[float] | None]:
    """Return for each span of time own time, time and wait for data of a step; None without a step in it."""
    starts, _, steps, _, spent, *_ = zip(*windows, strict=True)
    phases, whole = [*zip(*spent, strict=True)], [*map(sum, spent)]
    own = [*map(sub, whole, phases[_EXCHANGE])]
    spans = [*zip(starts, map(add, starts, whole), strict=True)]
    edges = (start + width * edge for edge in range(columns + 1))
    totals = cumulated([own, whole, phases[_DATA], steps], spans, edges)
    return [
        [seconds / made for seconds in seconds_of] if made else None
        for *seconds_of, made in zip(*map(differences, totals), strict=True)
    ]


def _name(row: Sequence[RankTimes]) -> str:
    return f"rank {row[0].rank}" if len(row) == 1 else f"ranks {row[0].rank}-{row[-1].rank}"


# --- what could be better ---


def _advice(run: Run, ranks: Sequence[RankTimes], means: Sequence[Sequence[float]]) -> tuple[list[str], float]:
    """Return sentences on ranks for which the others waited, or on data for which all did, and on slow GPUs.

    The number is the seconds that the others waited for such ranks.
    """
    starts = sorted({window.restart for each in ranks for window in each.windows}) if len(ranks) > 1 else []
    found, gpus = explained(
        (one for restart in starts for one in find(of_start(ranks, restart))), ranks, run.attempt_folder
    )
    sentences = [f"{_capital(one)}. {_FIXES['clock']}" for one in gpus]
    if found:
        late = sum(max(0.0, one.seconds - one.others) * one.steps for one in found if one.phase != "exchange")
        worst = max(found, key=lambda one: (one.seconds - one.others) * one.steps)
        more = f" ({len(found) - 1} more of this kind.)" if len(found) > 1 else ""
        return [f"{_capital(worst.sentence)}. {_fix(worst.phase, worst.workers)}".rstrip() + more, *sentences], late
    return [*sentences, *_on_data(run, ranks, means)], 0.0


def _on_data(run: Run, ranks: Sequence[RankTimes], means: Sequence[Sequence[float]]) -> list[str]:
    """Return a sentence if the ranks wait for data in a large part of each step."""
    if not means:
        return []
    step, data = statistics.median(map(sum, means)), statistics.median(each[_DATA] for each in means)
    if data <= _MUCH_DATA * step:
        return []
    samples = {one["node"]: one for one in node_usage(run.attempt_folder)}
    everyone = {node: [one.rank for one in ranks if one.node == node] for node in samples}
    workers = workers_of(run.attempt_folder, samples, everyone)
    evidence = f"{workers}; " if workers else ""
    what = f"All ranks wait for data: {evidence}{format_span(data)} of each step of {format_span(step)}."
    return [f"{what} {_fix('data', workers)}"]


def _fix(phase: str, workers: Workers | None) -> str:
    return workers.fix if workers else _FIXES.get(phase, "")


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
