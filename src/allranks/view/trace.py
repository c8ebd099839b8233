"""``allranks report --trace``: the timeline of runs as a trace that Perfetto and Chrome open.

The form is Chrome's trace events, of which both read ``X`` (a span), ``i`` (a moment) and ``M`` (a name). A run and
each of its nodes are what they call a process, and a rank is a thread of its node's.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from allranks import contract
from allranks.record.events import Event, read_events, read_saves
from allranks.runs import agents
from allranks.runs.record import Run
from allranks.view.attempts import attempts_of

#: How a trace of ours starts.
MARK = '{"otherData":{"tool":"allranks"}'
#: Of each run's processes: more than it has nodes.
_MOST_NODES, _MOST_OF_A_TASK = 1_000_000, 1_000
#: The thread of a run's process that its checkpoints are on; its attempts are on the next ones.
_CHECKPOINTS = 0


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
