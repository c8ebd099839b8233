"""An agent's events as notifications of its run: see :mod:`allranks.record.notify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allranks import contract
from allranks.record.events import EventWriter
from allranks.record.notify import Notifier

#: Events of an agent that are worth a notification.
_KINDS = {contract.AGENT_STARTED: "start", contract.RESTART: "requeue", contract.ENDED: "end"}


class NotifyingWriter(EventWriter):
    """Writes an agent's events, and notifies of some of them.

    ``has_supervisor``: whether that notifies of the start and the end of an attempt.
    """

    def __init__(self, path: Path, mode: int, notifier: Notifier, *, has_supervisor: bool) -> None:
        super().__init__(path, mode)
        self._notifier = notifier
        self._kinds = {contract.RESTART: "requeue"} if has_supervisor else _KINDS

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event, and notify of it; at the end, wait for that, and record what could not be sent."""
        super().write(kind, **fields)
        if event := self._kinds.get(kind):
            facts: dict[str, Any] = {"state": fields.get("state", "RUNNING")}
            if kind == contract.ENDED:
                facts |= {name: fields[name] for name in ("exit_code", "reason")}
                event = "failure" if facts["state"] == "FAILED" else event
            elif kind == contract.RESTART:
                rank = fields["because_of_rank"]
                why = "a node was lost or came, or no rank advanced" if rank is None else f"rank {rank} failed"
                facts |= {"restart": fields["restart"], "reason": why}
            self._notifier.send(event, **facts)
        if kind == contract.ENDED:
            for name, problem in self._notifier.finish():
                super().write(contract.NOTIFY_FAILED, event=name, problem=problem)
