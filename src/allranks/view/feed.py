"""Reads the data that ``allranks watch`` shows of a run incrementally."""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.errors import AllranksError
from allranks.job.problems import printable
from allranks.job.units import format_count
from allranks.launch.refresh import settled
from allranks.logs.lineform import LineForm
from allranks.logs.merge import MergedLogs, Tail
from allranks.record.events import read_events
from allranks.runs import agents
from allranks.runs.attempt import decision_after
from allranks.runs.hangs import halted
from allranks.runs.metrics import MetricsReader
from allranks.runs.record import Run, load, newest_attempt
from allranks.runs.status import State
from allranks.runs.steptime import Position, position
from allranks.runs.stragglers import inspect
from allranks.runs.usage import node_usage
from allranks.view.reader import Changes, Saves

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind

#: Most lines of a log, points of a curve, and events to keep.
_LINES, _POINTS, _EVENTS = 2000, 512, 200
#: Seconds between queries of a run's state and nodes, as in `allranks top`; and after a failed query.
_STATUS_SECONDS, _FAILED_SECONDS = 2.0, 15.0
#: Seconds between searches for stragglers, which read a file of each rank.
_STRAGGLER_SECONDS = 20.0
#: Control sequences of terminals (ECMA-48).
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class Curve:
    """The values of a metric: the last one, and at most 512 points, each the mean of the same number of values."""

    def __init__(self) -> None:
        self.last = math.nan
        self._points: list[float] = []
        self._each = 1
        self._open: list[float] = []

    @property
    def points(self) -> list[float]:
        """The points so far, the oldest first."""
        return self._points + ([fmean(self._open)] if self._open else [])

    def add(self, value: float) -> None:
        """Add the next value; one that is not finite is shown while it is the last."""
        self.last = value
        if not math.isfinite(value):
            return
        self._open.append(value)
        if len(self._open) == self._each:
            self._points.append(fmean(self._open))
            self._open = []
        if len(self._points) == _POINTS:
            self._points = [fmean(self._points[at : at + 2]) for at in range(0, _POINTS, 2)]
            self._each *= 2


class Metrics:
    """The metrics that a run has logged so far."""

    def __init__(self, folder: Path) -> None:
        self.step: int | None = None
        self.curves: dict[str, Curve] = {}
        self._reader = MetricsReader(folder)

    @property
    def shown(self) -> dict[str, tuple[float, list[float]]]:
        """Last value and points of the curve, by name."""
        return {name: (curve.last, curve.points) for name, curve in self.curves.items()}

    def read(self) -> None:
        """Read what is new."""
        lines, restarts = self._reader.read()
        if restarts:
            self.step, self.curves = None, {}
        for line in lines:
            self.step = line.step
            for name, value in line.values.items():
                self.curves.setdefault(name, Curve()).add(value)


@dataclass(frozen=True)
class Snapshot:
    """A run at one time.

    Attributes:
        run: with its status.
        time: when that was, in seconds since 1970.
        attempt: its number, from 0.
        command: what its ranks run.
        left: seconds until the end of the allocation, if it has one that is known.
        step: of the newest metrics; None if there are none.
        metrics: by name, the last value and the points of the curve.
        nodes: the newest sample of each node: see :func:`~allranks.runs.usage.node_usage`.
        lines: the last lines of all ranks' output, or of ``rank``'s; None while they have not been read.
        rank: the rank whose lines they are; None: of all.
        events: what happened, each with its time in seconds since 1970.
        saved: the step of the newest checkpoint, and when it was written, if that is known.
        delay: for how long no rank has advanced, or for which rank the others wait; empty if they advance.
        problem: why the state cannot be found out; empty if it can.
        age: for how many seconds nothing newer has been read.
        position: where the training is in its epochs; None if that is not known.
        own: by node, seconds of a step of each of its ranks, without the wait for others; empty if that is not known.
    """

    run: Run
    time: float
    attempt: int = 0
    command: str = ""
    left: float | None = None
    step: int | None = None
    metrics: Mapping[str, tuple[float, list[float]]] = field(default_factory=dict)
    nodes: Sequence[dict[str, Any]] = ()
    lines: Sequence[str] | None = None
    rank: int | None = None
    events: Sequence[tuple[float, str]] = ()
    saved: tuple[int, float | None] | None = None
    delay: str = ""
    problem: str = ""
    age: float = 0.0
    position: Position | None = None
    own: Mapping[int, Sequence[float]] = field(default_factory=dict)


class LiveStatus:
    """The status of a run, queried as often as in ``allranks top``."""

    def __init__(self, run: Run, kind: ClusterKind) -> None:
        self.run, self.problem = run, ""
        self._kind, self._next = kind, 0.0
        self._record = Changes(run.folder / contract.RECORD_FILE)

    def read(self) -> bool:
        """Query it if due; return whether it was."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _STATUS_SECONDS
        try:
            if self._record.are_there():  # Its launcher or another command has changed it.
                self.run = load(self.run.folder)
            self.run, self.problem = settled(self.run, self._kind), ""
        except AllranksError as error:  # A scheduler that does not answer may later.
            self.problem = ": ".join(filter(None, (error.what, error.why)))
            self._next = time.monotonic() + _FAILED_SECONDS
        return True


class _Delays:
    """Messages on ranks that do not advance, and on stragglers; ``own`` as in a snapshot."""

    def __init__(self) -> None:
        self.own: Mapping[int, Sequence[float]] = {}
        self._straggler, self._looked = "", -math.inf

    def find(self, run: Run) -> str:
        """Return the message; empty if its ranks advance. Stragglers are searched for only at intervals."""
        if halt := halted(run.attempt_folder):
            return printable(halt)
        if time.monotonic() - self._looked >= _STRAGGLER_SECONDS:
            self._looked = time.monotonic()
            sentences, self.own = inspect(run.attempt_folder)
            self._straggler = next(map(printable, sentences), "")
        return self._straggler


class Figures:
    """Reads a run's record without its state and logs, for callers that have these."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._metrics, self._saves, self._delays = Metrics(run.folder), Saves(run.folder), _Delays()

    def read(self) -> Snapshot:
        """Return the run as it is now."""
        run = self._run
        self._metrics.read()
        self._saves.read()
        return Snapshot(
            run,
            time.time(),
            run.attempt,
            left=_left(run),
            step=self._metrics.step,
            metrics=self._metrics.shown,
            nodes=[*node_usage(run.attempt_folder)],
            saved=self._saves.newest,
            delay=self._delays.find(run),
            position=position(run, time.time()),
        )


class Feed:
    """Reads a run. ``read`` is called by one thread, ``show_rank`` by any."""

    def __init__(self, run: Run, kind: ClusterKind) -> None:
        self._status = LiveStatus(run, kind)
        self._metrics = Metrics(run.folder)
        self._events = _Events(run.folder)
        self._logs: dict[int | None, _Log] = {}
        self._rank: int | None = None
        self._nodes: list[dict[str, Any]] = []
        self._delays, self._delay = _Delays(), ""
        self._position: Position | None = None

    def show_rank(self, rank: int | None) -> None:
        """Read the lines of one rank from the next call on; None: of all."""
        self._rank = rank

    def read(self) -> Snapshot:
        """Return the run as it is now."""
        if self._status.read():
            run = self._status.run
            self._nodes = [*node_usage(run.attempt_folder)]
            self._delay = self._delays.find(run) if run.record.status.state is State.RUNNING else ""
            self._position = position(run, time.time()) if run.record.status.state is State.RUNNING else None
            self._events.read()
        run = self._status.run
        self._metrics.read()
        log = self._read_log(run)
        return Snapshot(
            run,
            time.time(),
            run.attempt,
            run.command,
            _left(run) if run.record.status.state is State.RUNNING else None,
            self._metrics.step,
            self._metrics.shown,
            self._nodes,
            log.lines(),
            log.rank,
            self._events.all,
            self._events.saves.newest,
            self._delay,
            self._status.problem,
            position=self._position,
            own=self._delays.own,
        )

    def _read_log(self, run: Run) -> _Log:
        rank, attempt = self._rank, run.attempt
        self._logs = {key: log for key, log in self._logs.items() if key in (None, rank)}
        log = self._logs.get(rank)
        if log and log.attempt != attempt:
            log.read(has_ended=True)
        if log is None or log.attempt != attempt:
            log = self._logs[rank] = _Log(run, attempt, rank, log.lines() if log else ())
        log.read(has_ended=run.record.status.state.is_final)
        return log


class _Log:
    """The last lines of an attempt's ranks, after those of the attempt before it."""

    def __init__(self, run: Run, attempt: int, rank: int | None, before: Sequence[str]) -> None:
        self.attempt, self.rank = attempt, rank
        self._kept = deque[str](before, maxlen=_LINES)
        self._tail = Tail(_LINES)
        self._has_ended = False
        self._merged = MergedLogs(
            run.folder / contract.attempt_dir(attempt),
            self._tail.out,
            self._tail.err,
            ranks=None if rank is None else {rank},
            nnodes=run.record.nnodes,
            world_size=run.record.world_size,
            form=LineForm(fold_frames=True),
            hurries=_LINES,
        )

    def lines(self) -> list[str]:
        """Return the last lines, and a progress bar after them."""
        bar = self._merged.transient()
        return [*self._kept, *([_plain(bar)] if bar else [])]

    def read(self, *, has_ended: bool) -> None:
        """Read what is new."""
        if not self._has_ended:
            (self._merged.finish if has_ended else self._merged.pump)()
        self._has_ended = has_ended
        self._tail.write(self._keep, self._keep)

    def _keep(self, line: bytes) -> None:
        self._kept.append(_plain(line))


def _plain(line: bytes) -> str:
    """Return a line without control sequences."""
    text = line.decode(errors="replace").rstrip("\r\n")
    return text if text.isprintable() else printable(_ESCAPE.sub("", text).expandtabs())


class _Events:
    """Events of a run over all attempts, from the agent of the first node, since all agents record the same."""

    def __init__(self, folder: Path) -> None:
        self.all: list[tuple[float, str]] = []
        self.saves = Saves(folder)
        self._folder = folder
        self._attempts: dict[int, tuple[Changes, Path, list[tuple[float, str]]]] = {}

    def read(self) -> None:
        """Read what is new."""
        has_changed = self.saves.read()
        last = max(self._attempts, default=0)
        for number in range(last, newest_attempt(self._folder) + 1):  # Those before the last do not change any more.
            has_changed = self._read_attempt(number) or has_changed
        if has_changed:
            found = [(when, text, False) for _, _, events in self._attempts.values() for when, text in events]
            found += [(when, f"checkpoint at step {step}", True) for step, when in self.saves.all if when]
            found.sort()
            # Of checkpoints that follow each other the last one: a training may make hundreds.
            kept = [event for event, after in zip_longest(found, found[1:]) if not (event[2] and after and after[2])]
            self.all = [(when, text) for when, text, _ in kept[-_EVENTS:]]

    def _read_attempt(self, number: int) -> bool:
        attempt = self._folder / contract.attempt_dir(number)
        if number not in self._attempts:
            node = min(attempt.glob("node-*"), default=None)
            if not node:
                return False
            self._attempts[number] = Changes(node / contract.AGENT_EVENTS), node, []
        changes, node, _ = self._attempts[number]
        if not changes.are_there():
            return False
        self._attempts[number] = changes, node, [*_bounds(node, number), *agents.history(node), *_followed(attempt)]
        return True


def _bounds(node: Path, number: int) -> Iterator[tuple[float, str]]:
    """Yield the first start of an attempt's ranks, and its end."""
    has_started = False
    for event in read_events(node / contract.AGENT_EVENTS):
        if event.kind == contract.RANKS_STARTED and not has_started:
            has_started = True
            count = event.fields.get("world_size", len(event.fields.get("ranks", ())))
            yield event.time, f"attempt {number + 1}: {format_count(count, 'rank')} started"
        elif event.kind == contract.ENDED:
            ended = f"attempt {number + 1} ended: {event.fields.get('state')}"
            reason = event.fields.get("reason")
            yield event.time, f"{ended}: {reason}" if reason else ended


def _followed(attempt: Path) -> Iterator[tuple[float, str]]:
    decision = decision_after(attempt)
    if decision.get("again"):
        with suppress(OSError):
            yield (attempt / contract.AGAIN).stat().st_mtime, f"another attempt follows: {decision.get('why', '')}"


def _left(run: Run) -> float | None:
    """Return the seconds until the end of the newest attempt's job, as it was requested; None if that is not known."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        limit = json.loads((run.folder / contract.BATCH_SPEC).read_text())["time"]
        return max(0.0, (run.attempt_folder / contract.JOB).stat().st_mtime + float(limit) - time.time())
    return None


# --- the runs of a list: only those that fit on the screen ---


@dataclass(frozen=True)
class Row:
    """A run of several: its step, the last value of each metric, and where it is in its epochs, if that is known."""

    run: Run
    step: int | None
    last: Mapping[str, float]
    problem: str = ""
    position: Position | None = None


@dataclass(frozen=True)
class Rows:
    """Some runs of a list, of which the first is number ``top``, counted from 0, of ``total``."""

    rows: Sequence[Row] = ()
    top: int = 0
    total: int = 0


class RunsFeed:
    """Reads runs. ``find`` returns all, the newest first, and is called again each time; ``show`` is, by any thread."""

    def __init__(self, find: Callable[[], Sequence[Path]], kind_of: Callable[[str], ClusterKind]) -> None:
        self._find, self._kind_of = find, kind_of
        self._known: dict[Path, tuple[LiveStatus, Metrics]] = {}
        self._positions: dict[Path, Position | None] = {}
        self._shown = (0, 1)

    def show(self, top: int, most: int) -> None:
        """Read so many runs from one on, from the next call on."""
        self._shown = (top, most)

    def read(self) -> Rows:
        """Return the runs that are shown as they are now."""
        folders, (top, most) = self._find(), self._shown
        top = max(0, min(top, len(folders) - most))
        found = (self._read(folder) for folder in folders[top : top + most])
        return Rows([row for row in found if row], top, len(folders))

    def _read(self, folder: Path) -> Row | None:
        if folder not in self._known:
            try:
                run = load(folder)
                status = LiveStatus(run, self._kind_of(run.record.kind))
            except AllranksError:  # `allranks ps` reports it.
                return None
            self._known[folder] = status, Metrics(folder)
        status, metrics = self._known[folder]
        if status.read():
            is_running = status.run.record.status.state is State.RUNNING
            self._positions[folder] = position(status.run, time.time()) if is_running else None
        metrics.read()
        last = {name: curve.last for name, curve in metrics.curves.items()}
        return Row(status.run, metrics.step, last, status.problem, self._positions.get(folder))
