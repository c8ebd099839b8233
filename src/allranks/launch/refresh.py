"""Refresh a run's status, and save it once it is final."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

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
        status = replace(status, started=agents.began(run) or status.started)
    ranks, nodes = agents.size(run.attempt_folder) or (run.world_size, run.record.nnodes)
    if tasks := run.tasks:
        sizes = [agents.size(task) or (ranks, nodes) for task in tasks]
        ranks, nodes = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
        if status.state is State.FAILED and not status.reason:
            status = replace(status, reason=agents.failed_task(tasks))
    if status.state.is_final and status.rank is not None:
        from allranks.runs.blame import with_cause  # Of a failure alone: a command that reads starts sooner.

        status = with_cause(status, run.attempt_folder, run.record.stop_timeout)
    return replace(run, record=replace(run.record, status=status, world_size=ranks, nnodes=nodes))


def settled(run: Run, kind: ClusterKind | None = None) -> Run:
    """Return the run with its status as it is now, and save that if it is final."""
    now = observed(run, kind)
    if now.record.status.state.is_final and not run.record.status.state.is_final:
        # A user who may only read, or a full disk, leaves saving to the next command.
        with contextlib.suppress(RunFolderError):
            written = load(run.folder)  # Meanwhile the command that follows the run may have: it knows more.
            return written if written.record.status.state.is_final else now.with_status(now.record.status)
    return now
