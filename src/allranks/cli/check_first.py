"""The quick part of preflight, before a run starts: what cannot work is refused, what may not work well is noted."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from allranks.cli import render
from allranks.cli.checked import grouped
from allranks.errors import AllranksError, PreflightError, StartCancelledError
from allranks.hostlist import fold

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind
    from allranks.clusters.launch import Launch
    from allranks.plan.plan import Plan
    from allranks.preflight.report import Report, Result
    from allranks.runs.record import Run


def check_first(run: Run, plan: Plan, kind: ClusterKind, launch: Launch) -> None:
    """Check what a run needs, before anything of it starts. What is found stays in the run's folder.

    Args:
        run: the run, prepared.
        plan: its plan.
        kind: the kind of cluster that made the plan.
        launch: what is launched.

    Raises:
        PreflightError: it cannot work. The run's record says so.
        StartCancelledError: Ctrl-C.
    """
    from allranks.clusters.launch import note_refusal

    try:
        _check(run, plan, kind, launch)
    except AllranksError as error:
        note_refusal(run, error)
        raise
    except KeyboardInterrupt:
        cancelled = StartCancelledError(f"{run.record.id} was cancelled before it had begun", signal.SIGINT)
        note_refusal(run, cancelled)
        raise cancelled from None


def _check(run: Run, plan: Plan, kind: ClusterKind, launch: Launch) -> None:
    from allranks.preflight.preflight import preflight
    from allranks.preflight.report import FILE
    from allranks.preflight.site import chosen_for
    from allranks.runs.files import write_json

    environment = launch.job.environment
    is_prepared = not (environment.setup or environment.node_setup)
    checks = chosen_for(launch, (), (), is_full=False)
    report = preflight(checks, kind, launch, plan, run.folder, is_prepared=is_prepared, is_submitted=True)
    path = run.folder / FILE
    write_json(path, report.to_json(), 0o640 if plan.group_readable else 0o600)
    _note_warnings(report)
    if not report.is_good:
        raise _refusal(report, render.path(path))


def _note_warnings(report: Report) -> None:
    from allranks.preflight.model import Grade

    for first, hosts in grouped(report.of(Grade.WARN)):
        render.talk(f"allranks: note: {_told(first, hosts)}; {first.finding.fix}")


def _refusal(report: Report, path: str) -> PreflightError:
    """Make the error for what was found first; what else was is told before it."""
    from allranks.preflight.model import Grade

    (first, hosts), *others = grouped(report.of(Grade.FAIL))
    for other, its_hosts in others:
        render.talk(f"allranks: {_told(other, its_hosts)}")
    found = first.finding
    return PreflightError(_told(first, hosts), why=found.why or first.check.why, fix=found.fix, see=path)


def _told(result: Result, hosts: Sequence[str]) -> str:
    return f"{result.check.name}{f' on {fold(hosts)}' if hosts else ''}: {result.finding.what}"
