"""Reads the reports of a run's agents: status and events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from allranks import contract
from allranks.errors import RunFolderError
from allranks.job.units import format_count
from allranks.record.events import Event, read_events
from allranks.runs.attempt import decision_after, exit_of
from allranks.runs.record import Run, newest_attempt
from allranks.runs.status import State, Status

#: Agents write a heartbeat every 5 s. Seen from another machine, one that is older than this counts as dead.
HEARTBEAT_IS_OLD = contract.scaled_wait(30.0)
_MOST_NAMED = 4
_STARTING = "starting ranks"


def fold(events: Iterable[Event]) -> Status:
    """Return the status that follows from a node's events; PENDING if there are none yet."""
    status = Status(State.PENDING, "starting")
    for event in events:
        fields = event.fields
        match event.kind:
            case contract.AGENT_STARTED:
                status = Status(State.PENDING, "starting ranks", started=fields.get("began"))
            case contract.RANKS_STARTED | contract.RESTART:
                native = "restarting" if event.kind == contract.RESTART else "ranks running"
                restarts = int(fields.get("restart", 0))
                status = Status(State.RUNNING, native, started=status.started, restarts=restarts)
            case contract.ENDED:
                word = fields.get("state")
                status = Status(
                    State(word) if word in State.__members__ else State.UNKNOWN,
                    "ended",
                    reason=fields.get("reason"),
                    exit_code=fields.get("exit_code"),
                    rank=fields.get("because_of_rank"),
                    started=status.started,
                    ended=event.time,
                    restarts=status.restarts,
                )
    return status


def reported_by(folder: Path) -> Status:
    """Return the status that a node's agent reported."""
    return fold(read_events(folder / contract.AGENT_EVENTS))


class NodeReport(NamedTuple):
    """Report of a node's agent: its status, the nodes that it lost, and whether it ended because of that."""

    status: Status
    lost: frozenset[int]
    ended_by_loss: bool


def reported_by_each(attempt: Path) -> dict[Path, NodeReport]:
    """Return what each node's agent reported, by the node's directory."""
    found = {}
    for folder in sorted(attempt.glob("node-*")):
        events = [*read_events(folder / contract.AGENT_EVENTS)]
        lost = (int(event.fields["node"]) for event in events if event.kind == contract.NODE_LOST)
        by_loss = any(event.kind == contract.ENDED and event.fields.get("lost") for event in events)
        found[folder] = NodeReport(fold(events), frozenset(lost), by_loss)
    return found


def reported_by_all(attempt: Path) -> Status:
    """Return the status that all agents of an attempt reported: final when all of them have exited."""
    return combined([each.status for each in reported_by_each(attempt).values()])


def combined(reported: Collection[Status]) -> Status:
    """Combine the statuses of agents: final when all of them have exited."""
    if not reported:
        return fold(())
    ended = [status for status in reported if status.state.is_final]
    if len(ended) < len(reported):
        return max((status for status in reported if not status.state.is_final), key=lambda status: status.state.value)
    blamed = [status for status in ended if status.rank is not None]
    worst = [status for status in ended if status.state is not State.SUCCEEDED]
    first = min(blamed or worst or ended, key=lambda status: status.ended or 0.0)
    return first._replace(ended=max(status.ended or 0.0 for status in ended))


def end_of(reported: Mapping[Path, NodeReport]) -> Status:
    """Return the final status of an attempt from its nodes' reports, without those of lost nodes.

    A cancelled node takes precedence over nodes that were cut off and only report that they lost each other.
    """
    cancelled = [each.status for each in reported.values() if each.status.state is State.CANCELLED]
    others = (each for each in reported.values() if each.status.state not in (State.CANCELLED, State.SUCCEEDED))
    if cancelled and all(each.ended_by_loss for each in others):
        return combined(cancelled)
    lost = lost_folders(reported)
    known = [each for folder, each in reported.items() if folder not in lost] or reported.values()
    return combined([each.status for each in known])


def lost_folders(reported: Mapping[Path, NodeReport]) -> set[Path]:
    """Return the directories of nodes that other nodes report as lost."""
    return {folder.with_name(f"node-{node:03}") for folder, each in reported.items() for node in each.lost}


def has_one_failed(reported: Mapping[Path, NodeReport]) -> bool:
    """Return True if a node of an attempt has ended without success."""
    return any(each.status.state.is_final and each.status.state is not State.SUCCEEDED for each in reported.values())


def began(run: Run) -> float | None:
    """Return when a run's first attempt started, in seconds since 1970; None if not recorded."""
    first = run.folder / contract.attempt_dir(0)
    with contextlib.suppress(OSError):
        return reported_by_all(first).started or (first / contract.JOB).stat().st_mtime
    return None


def size(attempt: Path) -> tuple[int, int] | None:
    """Return the numbers of ranks and nodes of an attempt's last generation; None if no ranks were started.

    With an elastic number of nodes they may differ from the plan. They are read from the first node recorded here:
    node 0, which is part of every generation, or the only local node of a job whose nodes were started by hand.
    """
    for folder in sorted(attempt.glob("node-*")):
        started = _last(folder, contract.RANKS_STARTED)
        if started and "nodes" in started.fields:
            return int(started.fields["world_size"]), int(started.fields["nodes"])
    return None


def local_ranks(attempt: Path, node: int, key: str = "local_rank") -> dict[int, int]:
    """Return the ranks of a node's last generation by local rank, or by ``pid``; empty without an agent."""
    started = _last(attempt / f"node-{node:03d}", contract.RANKS_STARTED)
    found = started.fields.get("ranks", ()) if started else ()
    return {int(each[key]): int(each["rank"]) for each in found if key in each}


def failed_task(attempts: Iterable[Path]) -> str | None:
    """Return a message on the first failed task of a job array, by the tasks' newest attempts; None if none failed."""
    for attempt in attempts:
        reported, name = reported_by_all(attempt), task_name(attempt)
        if reported.state is State.FAILED and reported.reason:
            return f"{name}: {reported.reason}"
        if (ended := exit_of(attempt)) and ended[0]:
            return f"{name} exited with code {ended[0]}"
    return None


def task_name(attempt: Path) -> str:
    """Return the name of an attempt's task in a job array for messages: ``task 3``."""
    return attempt.parents[1].name.replace("-", " ")


def agent_pid(folder: Path) -> int:
    """Return the process id that a node's agent reported; 0 if there is none."""
    started = _last(folder, contract.AGENT_STARTED)
    return int(started.fields.get("pid", 0)) if started else 0


def heartbeat_age(folder: Path) -> float | None:
    """Return the seconds since a node's agent last showed that it is alive; None if it never did."""
    try:
        return time.time() - float((folder / contract.HEARTBEAT).read_text())
    except (OSError, ValueError):
        return None


def reported_error(folder: Path) -> Event | None:
    """Return the error that a node's agent ended with; None if it reported none."""
    return _last(folder, contract.ERROR)


def _last(folder: Path, kind: str) -> Event | None:
    events = [event for event in read_events(folder / contract.AGENT_EVENTS) if event.kind == kind]
    return events[-1] if events else None


def history(node: Path) -> list[tuple[float, str]]:
    """Return an agent's events as lines of text, each with its time in seconds since 1970."""
    reader = Happened(node)
    events = read_events(node / contract.AGENT_EVENTS)
    return [(event.time, line) for event in events if (line := reader.line(event))]


class Happened:
    """Reads new events of a node's agent. All agents record the same about other nodes."""

    def __init__(self, node: Path) -> None:
        self._awaited = _STARTING
        self._node = node
        self._size = self._count = self._failures = 0
        self._has_changed = False
        self._missed: set[str | None] = set()

    @property
    def awaited(self) -> str:
        """What the run waits for before its ranks run; empty while they run."""
        # Ranks that a scheduler has started have logs, and no agent.
        if self._awaited and (self._node / contract.LOG_INDEX).exists():
            return self._awaited if (self._node / contract.HEARTBEAT).exists() else ""
        return self._awaited

    def news(self) -> list[str]:
        """Return new events as lines of text."""
        path = self._node / contract.AGENT_EVENTS
        try:
            size = path.stat().st_size
        except OSError:
            return []
        if size == self._size:
            return []
        self._size = size
        events = [*read_events(path)][self._count :]
        self._count += len(events)
        return [line for event in events if (line := self.line(event))]

    def line(self, event: Event) -> str | None:
        """Return an event as a line of text; None if it is not shown, or from another version."""
        with contextlib.suppress(KeyError):
            return self._line(event)
        return None

    def _line(self, event: Event) -> str | None:
        fields = event.fields
        match event.kind:
            case contract.RANKS_STARTED:
                return self._started(fields["world_size"], fields.get("nodes", 1))
            case contract.ENDED:
                self._awaited = ""
            case contract.MISSING:
                return self._missing(fields["nodes"], fields["of"], fields.get("at"))
            case contract.RESTART:
                return self._restart(event)
            case contract.NODE_LOST:
                return f"node {fields['node']} ({event.host}) was lost: {fields['why']}"
            case contract.HANG | contract.HANG_OVER:
                from allranks.runs import hangs  # Imported here: most runs have no hang, and commands start sooner.

                return hangs.of_event(event).notice if event.kind == contract.HANG else hangs.OVER
            case contract.NOTIFY_FAILED:
                return f"note: notification of the {fields['event']} failed: {fields['problem']}"
            case contract.WARNED:
                return f"{fields['signal']}: the job is to end; ranks that listen save and exit"
        return None

    def _started(self, ranks: int, nodes: int) -> str | None:
        has_changed, self._has_changed, self._awaited = self._has_changed, False, ""
        self._missed.clear()
        return f"restarted with {format_count(ranks, 'rank')} on {format_count(nodes, 'node')}" if has_changed else None

    def _missing(self, nodes: list[int], count: int, at: str | None) -> str | None:
        """Return which nodes are missing; only once per start of ranks, as nodes may arrive one by one."""
        if not nodes:
            self._awaited = _STARTING  # All have connected.
            return None
        named = ", ".join(map(str, nodes[:_MOST_NAMED])) + (", …" if len(nodes) > _MOST_NAMED else "")
        where = f" at {at}" if at else f": {count - len(nodes)} of {count} here"
        self._awaited = f"waiting for {'node' if len(nodes) == 1 else 'nodes'} {named}{where}"
        is_known = at in self._missed
        self._missed.add(at)
        return None if is_known else self._awaited

    def _restart(self, event: Event) -> str | None:
        rank, restart, delay = (event.fields[name] for name in ("because_of_rank", "restart", "delay"))
        self._awaited = f"restarting in {delay:g} s" if delay else "restarting"
        self._has_changed = rank is None
        if rank is None:
            return None  # Nodes have left or joined: the next start of ranks reports how many there are.
        from allranks.runs.blame import restart_cause

        self._failures += 1
        why = f"rank {rank} failed"
        with contextlib.suppress(RunFolderError):
            why = restart_cause(self._node.parent, rank, restart - 1)
        if most := event.fields.get("max_restarts"):
            self._awaited += f", {self._failures} of {most}"
        return f"{why}; {self._awaited}"


class HappenedInJobs:
    """Reads new events of a run's newest attempt and of the attempts that follow it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._follow(newest_attempt(folder))

    def _follow(self, number: int) -> None:
        self._number, self._attempt = number, self._folder / contract.attempt_dir(number)
        self._happened = Happened(self._folder / contract.node_dir(number, 0))
        self._is_followed_by_another = False

    @property
    def awaited(self) -> str:
        """What the run waits for before its ranks run; empty while they run, and for job arrays."""
        return self._happened.awaited if (self._attempt / contract.JOB).exists() else ""

    def news(self) -> list[str]:
        """Return new events as lines of text."""
        last, news = newest_attempt(self._folder), self._happened.news()  # In this order no event is missed.
        while True:
            decision = decision_after(self._attempt)
            # A requeue is recorded before it is tried; if the scheduler rejects it, another job may follow.
            is_tried = decision.get("again") and (self._number < last or decision.get("how") != "requeue")
            if is_tried and not self._is_followed_by_another:
                self._is_followed_by_another = True
                news.append(f"attempt {self._number + 1} follows, in job {decision['job']}: {decision['why']}")
            if self._number >= last:  # The directory of the last attempt may have been removed.
                return news
            self._follow(self._number + 1)
            news += self._happened.news()
