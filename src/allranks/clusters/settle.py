"""What is known of a run now; an end that is seen is written down, so that it is known for good."""

from __future__ import annotations

from dataclasses import replace

from allranks.clusters.base import ClusterKind
from allranks.clusters.registry import load_kind
from allranks.runs.record import Run


def settled(run: Run, kind: ClusterKind | None = None) -> Run:
    """Return the run with its status as it is now."""
    if run.record.status.state.is_final:
        return run
    status = (kind or load_kind(run.record.kind)).status(run)
    if status.state.is_final:
        return run.with_status(status)
    return replace(run, record=replace(run.record, status=status))
