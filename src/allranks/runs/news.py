"""What an agent reports during a run that its user wants to know, a line each."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from allranks import contract
from allranks.errors import RunFolderError
from allranks.job.units import format_count
from allranks.record.events import Event, read_events
from allranks.runs.blame import restart_cause

_MOST_NAMED = 4
_STARTING = "starting ranks"


class Happened:
    """Reads new events of an agent in its node's directory. All agents record the same about other nodes."""

    def __init__(self, node: Path) -> None:
        self._awaited = _STARTING
        self._node = node
        self._size = self._count = self._failures = 0
        self._has_changed = False
        self._missed: set[str | None] = set()

    @property
    def awaited(self) -> str:
        """What is waited for until ranks run; empty while they run."""
        return self._awaited if self._awaited and not self._lacks_agent() else ""

    def news(self) -> list[str]:
        """Return what has happened since the last call, a line each."""
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
        return [line for event in events if (line := self._line(event))]

    def _lacks_agent(self) -> bool:
        """Return True if a scheduler has started the ranks: there are logs, and no agent."""
        return (self._node / contract.LOG_INDEX).exists() and not (self._node / contract.HEARTBEAT).exists()

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
            case contract.WARNED:
                return f"{fields['signal']}: the job is to end; ranks that listen save and exit"
        return None

    def _started(self, ranks: int, nodes: int) -> str | None:
        has_changed, self._has_changed, self._awaited = self._has_changed, False, ""
        self._missed.clear()
        return f"restarted with {format_count(ranks, 'rank')} on {format_count(nodes, 'node')}" if has_changed else None

    def _missing(self, nodes: list[int], count: int, at: str | None) -> str | None:
        """Return which nodes are missing; only the first time until ranks start, as they may come one by one."""
        if not nodes:
            self._awaited = _STARTING  # All have come.
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
        self._failures += 1
        why = f"rank {rank} failed"
        with suppress(RunFolderError):
            why = restart_cause(self._node.parent, rank, restart - 1)
        if most := event.fields.get("max_restarts"):
            self._awaited += f", {self._failures} of {most}"
        return f"{why}; {self._awaited}"
