"""What the agents of a run have told, folded into one status."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.base import Said
from allranks.runs.cause import find_cause, tail
from allranks.runs.events import Event, read_events
from allranks.runs.launcher_log import causes
from allranks.runs.status import State, Status

if TYPE_CHECKING:
    from allranks.runs.record import Run

#: What the script of a node says of a line that fails, and of an ``exit`` among the user's lines: see plan/script.py.
_FAILED = re.compile(r"(.*) failed with exit code (\d+) \((.*), line (\d+)\)")
_EXITED = re.compile(r'(environment\.\w+): "(.*)" ended the set-up with exit code (\d+)')
_KEY = re.compile(r"# environment\.\w+$")
#: A line of an agent's log that tells of a variable which it has set.
_SETTING = re.compile(r"(?:node \d+: )?[A-Z_]+=\S*: ")
#: An agent beats every 5 s; one that has not for this long is not counted as alive from another machine.
HEARTBEAT_IS_OLD = contract.scaled_wait(30.0)


def fold(events: Iterable[Event]) -> Status:
    """Fold a node's events into the status that they tell of; PENDING where there are none yet."""
    status = Status(State.PENDING, "starting")
    for event in events:
        status = _after(status, event)
    return status


def told_by(folder: Path) -> Status:
    """Return the status that a node's agent told of."""
    return fold(read_events(folder / contract.AGENT_EVENTS))


@dataclass(frozen=True)
class Told:
    """What a node's agent has told.

    Attributes:
        status: the status that it told of.
        lost: the nodes that it says were lost.
        ended_by_loss: whether it has ended because nodes were lost.
    """

    status: Status
    lost: frozenset[int]
    ended_by_loss: bool


def told_by_each(attempt: Path) -> dict[Path, Told]:
    """Return what each node's agent told, by the node's folder."""
    return {folder: _all_told_by(folder) for folder in sorted(attempt.glob("node-*"))}


def _all_told_by(folder: Path) -> Told:
    events = [*read_events(folder / contract.AGENT_EVENTS)]
    lost = (int(event.fields["node"]) for event in events if event.kind == contract.NODE_LOST)
    by_loss = any(event.kind == contract.ENDED and event.fields.get("lost") for event in events)
    return Told(fold(events), frozenset(lost), by_loss)


def told_by_all(attempt: Path) -> Status:
    """Return the status that the agents of all nodes of an attempt told of: final when all of them have ended."""
    return combined([each.status for each in told_by_each(attempt).values()])


def combined(told: Collection[Status]) -> Status:
    """Combine what agents told of: final when all of them have ended."""
    if not told:
        return fold(())
    ended = [status for status in told if status.state.is_final]
    if len(ended) < len(told):
        return max((status for status in told if not status.state.is_final), key=lambda status: status.state.value)
    blamed = [status for status in ended if status.rank is not None]
    worst = [status for status in ended if status.state is not State.SUCCEEDED]
    first = min(blamed or worst or ended, key=lambda status: status.ended or 0.0)
    return replace(first, ended=max(status.ended or 0.0 for status in ended))


def end_of(told: Mapping[Path, Told]) -> Status:
    """Return how an attempt ended, from what its nodes told: those that the others have lost do not count.

    A node that was cancelled tells more than nodes that were cut off and saw no more than that they lost each other.

    Args:
        told: what each node's agent told, by the node's folder.
    """
    cancelled = [each.status for each in told.values() if each.status.state is State.CANCELLED]
    others = (each for each in told.values() if each.status.state not in (State.CANCELLED, State.SUCCEEDED))
    if cancelled and all(each.ended_by_loss for each in others):
        return combined(cancelled)
    lost = lost_folders(told)
    known = [each for folder, each in told.items() if folder not in lost] or told.values()
    return combined([each.status for each in known])


def lost_folders(told: Mapping[Path, Told]) -> set[Path]:
    """Return the folders of the nodes that others of an attempt say were lost."""
    return {folder.with_name(f"node-{node:03}") for folder, each in told.items() for node in each.lost}


def has_one_failed(told: Mapping[Path, Told]) -> bool:
    """Tell whether a node of an attempt has ended, and not well."""
    return any(each.status.state.is_final and each.status.state is not State.SUCCEEDED for each in told.values())


def began(run: Run) -> float | None:
    """Return when a run's first attempt began, in seconds since 1970; None where nothing of it tells."""
    first = run.folder / contract.attempt_dir(0)
    with contextlib.suppress(OSError):
        return told_by_all(first).started or (first / contract.JOB).stat().st_mtime
    return None


def size(attempt: Path) -> tuple[int, int] | None:
    """Return how many ranks on how many nodes were started last in an attempt; None if none were.

    With an elastic number of nodes it need not be what was planned. The first node that is here tells: node 0, which is
    part of every generation, or the one node of a job whose nodes were started by hand.
    """
    for folder in sorted(attempt.glob("node-*")):
        found = [
            event.fields
            for event in read_events(folder / contract.AGENT_EVENTS)
            if event.kind == contract.RANKS_STARTED
        ]
        if found and "nodes" in found[-1]:
            return int(found[-1]["world_size"]), int(found[-1]["nodes"])
    return None


def _after(status: Status, event: Event) -> Status:
    fields = event.fields
    match event.kind:
        case contract.AGENT_STARTED:
            return Status(State.PENDING, "starting ranks", started=fields.get("began"))
        case contract.RANKS_STARTED:
            return _with(status, State.RUNNING, "ranks running", restarts=int(fields.get("restart", 0)))
        case contract.RESTART:
            return _with(status, State.RUNNING, "restarting", restarts=int(fields.get("restart", 0)))
        case contract.ENDED:
            return Status(
                _state(fields.get("state")),
                "ended",
                reason=fields.get("reason"),
                exit_code=fields.get("exit_code"),
                rank=fields.get("because_of_rank"),
                started=status.started,
                ended=event.time,
                restarts=status.restarts,
            )
    return status


def _state(word: object) -> State:
    return State(word) if word in State.__members__ else State.UNKNOWN


def _with(status: Status, state: State, native: str, *, restarts: int) -> Status:
    return Status(state, native, started=status.started, restarts=restarts)


def failed_task(attempts: Iterable[Path]) -> str | None:
    """Return which task of a job array failed first in their order, and why; None if none has.

    Args:
        attempts: the newest attempt of each task.
    """
    for attempt in attempts:
        told, name = told_by_all(attempt), task_name(attempt)
        if told.state is State.FAILED and told.reason:
            return f"{name}: {told.reason}"
        with contextlib.suppress(OSError, ValueError):
            if code := int((attempt / contract.EXIT).read_text()):
                return f"{name} ended with exit code {code}"
    return None


def task_name(attempt: Path) -> str:
    """Name the task of a job array that an attempt is of, for people: ``task 3``."""
    return attempt.parents[1].name.replace("-", " ")


def agent_pid(folder: Path) -> int:
    """Return the process id that a node's agent told; 0 if it has told none."""
    events = [event for event in read_events(folder / contract.AGENT_EVENTS) if event.kind == contract.AGENT_STARTED]
    return int(events[-1].fields.get("pid", 0)) if events else 0


def heartbeat_age(folder: Path) -> float | None:
    """Return the seconds since a node's agent last showed that it is alive; None if it never did."""
    try:
        return time.time() - float((folder / contract.HEARTBEAT).read_text())
    except (OSError, ValueError):
        return None


def said(folder: Path) -> Said:
    """Find what a node's agent said at last that may tell why it ended, or torch's own launcher in its place."""
    launcher_log = folder / contract.rank_log(contract.ALL_OF_A_NODE, "err")
    if launcher_log.exists() and (found := causes(launcher_log)):
        return Said(launcher_log, found)
    log = folder / contract.AGENT_LOG
    lines = tail(log)
    last = find_cause(lines[:-1] if failed_setup(folder) else lines)  # The line that failed is named anyway.
    is_cause = last is not None and not _SETTING.match(last)
    return Said(log if log.exists() else None, [last] if last and is_cause else [])


def failed_setup(folder: Path) -> tuple[str, int] | None:
    """Return which line of the set-up ended a node's script before its agent started, and its exit code."""
    said = next(reversed(tail(folder / contract.AGENT_LOG)), "").removeprefix("allranks: ")
    if found := _EXITED.fullmatch(said):
        return f"{found[1]} failed: {found[2]}", int(found[3])
    if found := _FAILED.fullmatch(said):
        return f"{_key_of(Path(found[3]), int(found[4]))} failed: {found[1]}", int(found[2])
    return None


def _key_of(script: Path, number: int) -> str:
    """Return which key of the job file has brought a line of a script, and which of its lines it is."""
    try:
        lines = script.read_text(errors="replace").splitlines()[:number]
    except OSError:
        return "the set-up"
    at, key = next(((at, line[2:]) for at, line in reversed([*enumerate(lines, 1)]) if _KEY.match(line)), (0, ""))
    return f"line {number - at} of {key}" if "setup" in key else key or "the set-up"


def told_error(folder: Path) -> Event | None:
    """Return the error that a node's agent ended with, if it told of one."""
    errors = [event for event in read_events(folder / contract.AGENT_EVENTS) if event.kind == contract.ERROR]
    return errors[-1] if errors else None
