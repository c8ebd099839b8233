"""The attempts of a run with their phases (waiting, starting, running, restarting), and as a trace for Perfetto."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.record.events import Event, read_events, read_saves
from allranks.runs import agents
from allranks.runs.record import Run
from allranks.runs.status import State

#: The phase that starts with each event, and lasts until the next one.
_STARTS = {contract.RANKS_STARTED: "running", contract.RESTART: "restarting", contract.ENDED: ""}
#: How a trace of ours starts.
MARK = '{"otherData":{"tool":"allranks"}'
#: Of each run's processes: more than it has nodes.
_MOST_NODES, _MOST_OF_A_TASK = 1_000_000, 1_000
#: The thread of a run's process that its checkpoints are on; its attempts are on the next ones.
_CHECKPOINTS = 0


@dataclass(frozen=True)
class Phase:
    """A part of an attempt, in seconds since 1970: ``waiting`` for nodes, ``starting``, ``running``, ``restarting``."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Attempt:
    """An attempt of a run, or of a task of a job array.

    Attributes:
        name: ``attempt 1``, or ``task 3``.
        phases: its phases in order of time.
        state: its final or current state.
        reason: reason of the state, if there is more to say.
        hosts: its nodes.
        news: its events as text, with their times in seconds since 1970.
    """

    name: str
    phases: list[Phase]
    state: State
    reason: str | None
    hosts: list[str]
    news: list[tuple[float, str]]


def attempts_of(run: Run) -> list[Attempt]:
    """Return the attempts of a run, oldest first; for a job array the newest attempt of each task."""
    status = run.record.status
    if run.tasks:
        return [_attempt(folder, agents.task_name(folder), run.record.created, None, None) for folder in run.tasks]
    found = list[Attempt]()
    free_since = run.record.created
    for number in range(run.attempt + 1):
        folder = run.folder / contract.attempt_dir(number)
        end = (status.ended or time.time()) if number == run.attempt else _last_sign(folder)
        started = status.started if number == run.attempt else None
        found.append(_attempt(folder, f"attempt {number + 1}", free_since, started, end))
        free_since = max([free_since, *(phase.end for phase in found[-1].phases)])
    return found


def _attempt(folder: Path, name: str, free_since: float, started: float | None, end: float | None) -> Attempt:
    """Read an attempt that could have started at ``free_since``.

    ``started`` is used without an agent, and ``end`` if no event marks its end.
    """
    reported = agents.reported_by_each(folder)
    status = agents.end_of(reported)
    hosts = list[str]()
    for node in reported:
        hosts += [event.host for event in islice(read_events(node / contract.AGENT_EVENTS), 1)]
    first = next(iter(reported), folder)  # All agents record the same events of the attempt.
    phases = _phases([*read_events(first / contract.AGENT_EVENTS)], free_since, started, end)
    return Attempt(name, phases, status.state, status.reason, hosts, agents.history(first))


def _phases(events: Sequence[Event], free_since: float, started: float | None, end: float | None) -> list[Phase]:
    kind, since, found = "waiting", free_since, list[Phase]()
    if not events and started:
        found += [Phase(kind, since, started)] if started > since else []
        kind, since = "running", started
    for event in events:
        if event.kind == contract.AGENT_STARTED:
            following, when = "starting", float(event.fields.get("began") or event.time)
        elif event.kind in _STARTS:
            following, when = _STARTS[event.kind], event.time
        else:
            continue
        if kind and when > since:
            found.append(Phase(kind, since, when))
        kind, since = following, when
    if kind and end is not None and end > since:
        found.append(Phase(kind, since, end))
    return found


def _last_sign(folder: Path) -> float | None:
    """Return when the agent of an attempt's first node was last alive; None if it never was."""
    ages = [age for node in sorted(folder.glob("node-*"))[:1] if (age := agents.heartbeat_age(node)) is not None]
    return time.time() - ages[0] if ages else None


# --- the trace: Chrome's trace events, of which Perfetto and Chrome read X (a span), i (a moment) and M (a name) ---
# A run and each of its nodes are what they call a process, and a rank is a thread of its node's.


def to_trace(runs: Sequence[Run]) -> str:
    """Return the timeline of runs as one line of JSON; times are microseconds since 1970."""
    events = [event for number, run in enumerate(runs) for event in _run(run, number * _MOST_NODES)]
    data = {"otherData": {"tool": "allranks"}, "displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(data, separators=(",", ":"))


def _run(run: Run, pid: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, whose process is ``pid`` and those of its nodes the next ones."""
    yield from _named(pid, f"run {run.record.id}", {_CHECKPOINTS: "checkpoints"})
    for save in read_saves(run.folder):
        if save.path and save.time:
            yield _moment(f"checkpoint of step {save.step}", save.time, pid, _CHECKPOINTS, {"path": save.path})
    for row, attempt in enumerate(attempts_of(run), 1):
        yield from _named(pid, None, {row: attempt.name})
        facts = {"state": attempt.state.value, "reason": attempt.reason}
        for phase in attempt.phases:
            yield _span(phase.kind, phase.start, phase.end, pid, row, facts)
        for when, text in attempt.news:
            yield _moment(text, when, pid, row)
    folders = run.tasks or [run.folder / contract.attempt_dir(number) for number in range(run.attempt + 1)]
    for index, folder in enumerate(folders):
        task = f"{agents.task_name(folder)}, " if run.tasks else ""
        for node in sorted(folder.glob("node-*")):
            number = int(node.name.removeprefix("node-"))
            events = [*read_events(node / contract.AGENT_EVENTS)]
            seen = time.time() - (agents.heartbeat_age(node) or math.inf)
            place = pid + 1 + number + index * _MOST_OF_A_TASK * bool(run.tasks)
            yield from _node(events, place, f"{task}node {number}", seen)


def _node(events: Sequence[Event], pid: int, name: str, seen: float) -> Iterator[dict[str, Any]]:
    """Yield a span for each rank of a node in each generation of ranks, from its start to its exit.

    Ranks that still run end when their agent was ``seen`` last.
    """
    running: dict[int, Event] = {}
    for event in events:
        if event.kind == contract.RANKS_STARTED:
            running = {each["rank"]: event for each in event.fields.get("ranks") or ()}
            yield from _named(pid, f"{name} ({event.host})", {rank: f"rank {rank}" for rank in running})
        elif event.kind == contract.RANK_EXITED and event.rank in running:
            end = event.fields.get("ended", event.time)
            yield _rank(running.pop(event.rank), event.rank, end, pid, event.fields.get("code"))
        elif event.kind in (contract.RESTART, contract.HANG, contract.STOP_REQUESTED):
            yield _moment(event.kind, event.time, pid, 0)
    for rank, start in running.items():  # They run, or no agent has seen them exit.
        yield _rank(start, rank, max(events[-1].time, seen), pid, None)


def _rank(start: Event, rank: int, end: float, pid: int, code: int | None) -> dict[str, Any]:
    restart = start.fields.get("restart")
    name = f"restart {restart}" if restart else "running"
    return _span(name, start.time, end, pid, rank, {"exit code": code, "ranks": start.fields.get("world_size")})


def _named(pid: int, process: str | None, threads: dict[int, str]) -> Iterator[dict[str, Any]]:
    if process:
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _span(name: str, start: float, end: float, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    length = max(0, round((end - start) * 1e6))
    return {"ph": "X", "name": name, "ts": round(start * 1e6), "dur": length, "pid": pid, "tid": tid, "args": args}


def _moment(name: str, when: float, pid: int, tid: int, args: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "name": name, "ts": round(when * 1e6), "pid": pid, "tid": tid, "args": args or {}}
