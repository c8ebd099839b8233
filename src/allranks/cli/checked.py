"""How findings of checks are shown: each once, with the nodes that it is about."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from allranks.cli import render
from allranks.hostlist import fold
from allranks.job.units import format_count
from allranks.preflight.model import Grade

if TYPE_CHECKING:
    from allranks.preflight.report import Report, Result

#: From which on the nodes that a good finding is about are only counted.
_COUNTED = 3


def show(report: Report) -> None:
    """Show all findings on stdout, and on stderr what they come to."""
    groups = [group for group in grouped(report.results) if group[0].finding.grade is not Grade.SKIP]
    width = max((len(first.check.name) for first, _ in groups), default=0)
    for first, hosts in groups:
        render.data("\n".join(_lines(first, hosts, width)))
    for line in _skipped(report):
        render.data(line)
    render.talk(_summary(report))


def grouped(results: Iterable[Result]) -> list[tuple[Result, list[str]]]:
    """Put results together that say the same of different nodes; return each with these nodes."""
    groups: dict[tuple[str, ...], tuple[Result, list[str]]] = {}
    for result in results:
        found = result.finding
        key = (result.check.name, found.grade, found.what, found.fix)
        _, hosts = groups.setdefault(key, (result, []))
        hosts += [found.host] if found.host else []
    return [*groups.values()]


def _headline(result: Result, hosts: Sequence[str]) -> str:
    """Write what was found, behind the nodes that it is about."""
    return render.one_line(f"{fold(hosts)}: {result.finding.what}" if hosts else result.finding.what)


def _lines(result: Result, hosts: Sequence[str], width: int) -> list[str]:
    found = result.finding
    is_bad = found.grade in (Grade.WARN, Grade.FAIL)
    what = _headline(result, hosts)
    if not is_bad and len(hosts) > _COUNTED:
        what = f"{found.what} ({format_count(len(hosts), 'node')})"
    lines = [f"{render.graded(found.grade.value, sys.stdout)}  {result.check.name.ljust(width)}  {what}"]
    if is_bad:
        lines += [f"      why: {found.why or result.check.why}", f"      fix: {found.fix}"]
    return lines


def _skipped(report: Report) -> Iterator[str]:
    """Yield a line for each reason for which something was not looked at."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for result in report.of(Grade.SKIP):
        hosts = reasons.setdefault(result.finding.what, {}).setdefault(result.check.name, [])
        hosts += [result.finding.host] if result.finding.host else []
    for what, checks in reasons.items():
        some = sorted({host for hosts in checks.values() for host in hosts})
        where = f" on {render.one_line(fold(some))}" if some and len(some) < len(report.nodes) else ""
        yield f"{render.graded(Grade.SKIP.value, sys.stdout)}  {', '.join(checks)}{where}: {what}"


def _summary(report: Report) -> str:
    counts = {grade: len(grouped(report.of(grade))) for grade in (Grade.FAIL, Grade.WARN, Grade.PASS, Grade.SKIP)}
    words = {Grade.FAIL: "failed", Grade.WARN: "to look at", Grade.PASS: "good", Grade.SKIP: "skipped"}
    told = ", ".join(f"{count} {words[grade]}" for grade, count in counts.items() if count)
    on = f" on {format_count(len(report.nodes), 'node')}" if report.nodes else ""
    return f"allranks: {told or 'nothing was checked'}{on}, in {render.seconds(report.seconds)}"
