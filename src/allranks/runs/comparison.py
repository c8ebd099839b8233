"""Reads settings, results and metrics of runs to compare them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.errors import JobError
from allranks.runs import agents
from allranks.runs.code import code_of
from allranks.runs.metrics import MetricLine, read_metrics
from allranks.runs.record import Run

#: Job keys that do not affect the training.
_NOT_COMPARED = ("name", "runs.folder", "runs.group_readable")


@dataclass(frozen=True)
class Compared:
    """A run with the data for a comparison.

    Attributes:
        start: first start of its ranks, in seconds since 1970.
        settings: its job by keys of the job file, flags of the script by their names, and ``code``, the commit of its
           script.
    """

    run: Run
    start: float
    metrics: list[MetricLine]
    settings: Mapping[str, str]

    @property
    def seconds(self) -> float | None:
        """Seconds from its first start to its end; None while it runs."""
        ended = self.run.record.status.ended
        return ended - self.start if ended else None


def read(run: Run) -> Compared:
    """Read the data of a run for a comparison.

    Raises:
        RunFolderError: its metrics cannot be read.
    """
    start = agents.began(run) or run.record.status.started or run.record.created
    settings = _settings(run.folder / contract.JOB_FILE)
    if code := code_of(run):
        settings["code"] = str(code)
    return Compared(run, start, read_metrics(run.folder), settings)


def _settings(path: Path) -> dict[str, str]:
    """Return the keys of a run's job file with their values as text."""
    from allranks.job.files import read_job_file  # Imports pydantic, which --help does not need.

    try:
        job = read_job_file(path, Path.cwd())
    except JobError:  # The job file is incomplete or removed: the rest of the record is still there.
        return {path.name: "cannot be read"}
    flags = _flags(job.pop("args", None) or [])
    return {**dict(_flat(job, "")), **flags}


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else key)
    elif name in _NOT_COMPARED:
        return
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    else:
        yield name, "-" if value is None else str(value)


def _flags(args: Sequence[str]) -> dict[str, str]:
    """Return a script's arguments by flag, each with its values; positional ones before the first flag are ``args``."""
    found: dict[str, list[str]] = {}
    name = "args"
    for word in args:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found.setdefault(name, []).extend([value] if value else [])
        else:
            found.setdefault(name, []).append(word)
    return {name: shlex.join(values) or "yes" for name, values in found.items()}


def common_end(compared: Sequence[Compared]) -> tuple[int, float]:
    """Return the last step, and the last time in seconds after the start, that all runs with metrics have reached.

    A step of the second half that all have recorded is preferred, because a run's last line may be a mean of few steps.
    """
    with_metrics = [each for each in compared if each.metrics]
    if not with_metrics:
        return 0, 0.0
    reached = min(each.metrics[-1].step for each in with_metrics)
    recorded = set.intersection(*({line.step for line in each.metrics} for each in with_metrics))
    step = max((step for step in recorded if reached / 2 <= step <= reached), default=reached)
    return step, max(0.0, min(each.metrics[-1].time - each.start for each in with_metrics))


def rank_hours(run: Run) -> float | None:
    """Return the rank-hours of all attempts, without the time between them; None if an attempt's end is unknown."""
    seconds = 0.0
    for number in range(run.attempt + 1):
        folder = run.folder / contract.attempt_dir(number)
        status, (ranks, _) = agents.reported_by_all(folder), agents.size(folder) or (run.world_size, 1)
        if status.seconds is None:
            return None
        seconds += status.seconds * ranks
    return seconds / 3600


def names_of(values: Iterable[Mapping[str, object]]) -> list[str]:
    """Return all names, in the order of first appearance."""
    return [*dict.fromkeys(name for each in values for name in each)]


def different(compared: Sequence[Compared]) -> list[tuple[str, ...]]:
    """Return the settings that differ between the runs."""
    every = [each.settings for each in compared]
    rows = [(name, *(each.get(name, "-") for each in every)) for name in names_of(every)]
    return [row for row in rows if len({*row[1:]}) > 1]
