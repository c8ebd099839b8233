"""Notify of a run's end by the command that started it, where no agent could."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from allranks import contract
from allranks.record.events import read_events
from allranks.record.notify import Notifier
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.runs.record import Run


def notify_end(run: Run, environ: Mapping[str, str], workdir: str) -> None:
    """Notify of the end of a run if no agent has: that of its first node was killed, or torch's own launcher ran.

    ``environ`` has the URL of the webhook. What cannot be sent is a line on stderr.
    """
    node, status = run.node_folder(0), run.record.status
    if not (run.folder / contract.NOTIFY_FILE).exists() or (run.folder / contract.BATCH_ORDERS).exists():
        return  # The supervisor of a batch job notifies.
    has_agent = any(run.folder.glob("node*.json"))
    has_ended = any(event.kind == contract.ENDED for event in read_events(node / contract.AGENT_EVENTS))
    if not node.is_dir() or (has_agent and has_ended):
        return
    good = (State.SUCCEEDED, State.CANCELLED, State.PREEMPTED)
    notifier = Notifier(run.folder, run.attempt, environ=environ, workdir=workdir)
    reason = status.cause or status.reason
    event = "end" if status.state in good else "failure"
    seconds = (status.ended or time.time()) - (status.started or run.record.created)
    facts = {"state": status.state.value, "exit_code": status.exit_code, "reason": reason}
    notifier.send(event, **facts, seconds=round(seconds, 3))
    notifier.report()
