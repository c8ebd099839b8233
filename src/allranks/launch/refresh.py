"""Refresh a run's status, save it once it is final, and notify of the end where no agent could."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from allranks import contract
from allranks.errors import RunFolderError
from allranks.runs.record import load
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind
    from allranks.runs.record import Run


def observed(run: Run, kind: ClusterKind | None = None) -> Run:
    """Return the run with its status as it is now."""
    if run.record.status.state.is_final:
        return run
    from allranks.clusters.registry import load_kind  # Commands that read runs which have ended start sooner.
    from allranks.runs import agents

    status = (kind or load_kind(run.record.kind)).status(run)
    if status.started and run.attempt:
        status = status._replace(started=agents.began(run) or status.started)
    ranks, nodes = agents.size(run.attempt_folder) or (run.world_size, run.record.nnodes)
    if tasks := run.tasks:
        sizes = [agents.size(task) or (ranks, nodes) for task in tasks]
        ranks, nodes = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
        if status.state is State.FAILED and not status.reason:
            status = status._replace(reason=agents.failed_task(tasks))
    if status.state.is_final and status.rank is not None:
        from allranks.runs.blame import with_cause  # Of a failure alone: a command that reads starts sooner.

        status = with_cause(status, run.attempt_folder, run.record.stop_timeout)
    return run._replace(record=run.record._replace(status=status, world_size=ranks, nnodes=nodes))


def settled(run: Run, kind: ClusterKind | None = None) -> Run:
    """Return the run with its status as it is now, and save that if it is final."""
    now = observed(run, kind)
    if now.record.status.state.is_final and not run.record.status.state.is_final:
        # A user who may only read, or a full disk, leaves saving to the next command.
        with contextlib.suppress(RunFolderError):
            written = load(run.folder)  # Meanwhile the command that follows the run may have: it knows more.
            return written if written.record.status.state.is_final else now.with_status(now.record.status)
    return now


def notify_end(run: Run, environ: Mapping[str, str], workdir: str) -> None:
    """Notify of the end of a run if no agent has: that of its first node was killed, or torch's own launcher ran.

    ``environ`` has the URL of the webhook. What cannot be sent is a line on stderr.
    """
    from allranks.record.events import read_events  # Not for those who only read.
    from allranks.record.notify import Notifier

    node, status = run.node_folder(0), run.record.status
    if not (run.folder / contract.NOTIFY_FILE).exists() or (run.folder / contract.BATCH_SPEC).exists():
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
