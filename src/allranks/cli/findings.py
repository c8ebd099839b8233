"""Shows each finding of checks once, with its nodes; and does the quick checks before a run starts."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from allranks.checks.model import Grade
from allranks.cli import render
from allranks.errors import AllranksError, PreflightError, StartCancelledError
from allranks.job.units import format_count, format_seconds
from allranks.system.hostlist import fold

if TYPE_CHECKING:
    from allranks.checks.model import Result
    from allranks.checks.preflight import Report
    from allranks.clusters.base import ClusterKind
    from allranks.launch.submit import Launch
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run

#: More nodes of a finding that passed are only counted.
_MOST_NAMED = 3


def show(report: Report) -> None:
    """Print all findings to stdout, and the summary to stderr."""
    groups = [group for group in grouped(report.results) if group[0].finding.grade is not Grade.SKIP]
    width = max((len(first.check.name) for first, _ in groups), default=0)
    for first, hosts in groups:
        found = first.finding
        is_bad = found.grade in (Grade.WARN, Grade.FAIL)
        what = f"{fold(hosts)}: {found.what}" if hosts else found.what
        if not is_bad and len(hosts) > _MOST_NAMED:
            what = f"{found.what} ({format_count(len(hosts), 'node')})"
        render.data(f"{render.graded(found.grade.value)}  {first.check.name.ljust(width)}  {render.one_line(what)}")
        if is_bad:
            render.data(f"      why: {found.why or first.check.why}\n      fix: {found.fix}")
    _show_skipped(report)
    counts = {grade: len(grouped(report.of(grade))) for grade in (Grade.FAIL, Grade.WARN, Grade.PASS, Grade.SKIP)}
    warnings = "warning" if counts[Grade.WARN] == 1 else "warnings"
    words = {Grade.FAIL: "failed", Grade.WARN: warnings, Grade.PASS: "passed", Grade.SKIP: "skipped"}
    summary = ", ".join(f"{count} {words[grade]}" for grade, count in counts.items() if count)
    on = f" on {format_count(len(report.nodes), 'node')}" if report.nodes else ""
    render.talk(f"allranks: {summary or 'nothing was checked'}{on}, in {format_seconds(report.seconds)}")


def _show_skipped(report: Report) -> None:
    """Print each reason for which checks were skipped, with these, and with the nodes unless it holds for all."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for result in report.of(Grade.SKIP):
        hosts = reasons.setdefault(result.finding.what, {}).setdefault(result.check.name, [])
        if result.finding.host:
            hosts.append(result.finding.host)
    for reason, checks in reasons.items():
        some = {host for hosts in checks.values() for host in hosts}
        where = f" on {render.one_line(fold(sorted(some)))}" if some and len(some) < len(report.nodes) else ""
        render.data(f"{render.graded(Grade.SKIP.value)}  {', '.join(checks)}{where}: {reason}")


def grouped(results: Iterable[Result]) -> list[tuple[Result, list[str]]]:
    """Return each distinct result with the nodes that have it."""
    groups: dict[tuple[str, ...], tuple[Result, list[str]]] = {}
    for result in results:
        found = result.finding
        key = (result.check.name, found.grade, found.what, found.fix)
        _, hosts = groups.setdefault(key, (result, []))
        hosts += [found.host] if found.host else []
    return [*groups.values()]


def check_first(run: Run, plan: Plan, kind: ClusterKind, launch: Launch) -> None:
    """Check what a run needs before it starts. The report stays in the run's directory.

    Raises:
        PreflightError: it cannot work. The run's record says so.
        StartCancelledError: Ctrl-C.
    """
    from allranks.checks.preflight import FILE, preflight
    from allranks.checks.registry import chosen_for
    from allranks.launch.submit import note_refusal
    from allranks.record.files import write_json

    path, is_prepared = run.folder / FILE, not launch.is_set_up_by_user
    try:
        checks = chosen_for(launch, (), (), is_full=False)
        report = preflight(checks, kind, launch, plan, run.folder, is_prepared=is_prepared, is_submitted=True)
        write_json(path, report.to_json(), 0o640 if plan.group_readable else 0o600)
        for warning, hosts in grouped(report.of(Grade.WARN)):
            render.talk(f"allranks: note: {_in_a_line(warning, hosts)}; {warning.finding.fix}")
        if not report.is_good:
            (first, hosts), *others = grouped(report.of(Grade.FAIL))
            said = " ".join(failed.finding.what for failed in report.of(Grade.FAIL))
            for note in plan.notes:  # They may name what is missing better than the shell does.
                if note.partition(":")[0] not in said:
                    render.talk(f"allranks: note: {note}")
            for other, its_hosts in others:  # The error that is raised is what was found first.
                render.error(_error_of(other, its_hosts))
            raise _error_of(first, hosts, see=render.path(path))
    except AllranksError as error:
        note_refusal(run, error)
        raise
    except KeyboardInterrupt:
        cancelled = StartCancelledError(f"{run.record.id} was cancelled before it had started", signal.SIGINT)
        note_refusal(run, cancelled)
        raise cancelled from None


def _error_of(result: Result, hosts: Sequence[str], see: str | None = None) -> PreflightError:
    why, fix = result.finding.why or result.check.why, result.finding.fix
    return PreflightError(_in_a_line(result, hosts), why=why, fix=fix, see=see)


def _in_a_line(result: Result, hosts: Sequence[str]) -> str:
    return f"{result.check.name}{f' on {fold(hosts)}' if hosts else ''}: {result.finding.what}"
