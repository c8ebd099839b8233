"""Time of a run by phase (waiting, starting, running, restarting), from the events of its agents."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from allranks import contract
from allranks.record.events import Event, read_events
from allranks.runs import agents
from allranks.runs.record import Run
from allranks.runs.status import State

#: The phase that starts with each event, and lasts until the next one.
_STARTS = {contract.RANKS_STARTED: "running", contract.RESTART: "restarting", contract.ENDED: ""}


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
