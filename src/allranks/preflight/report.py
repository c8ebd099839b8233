"""Runs the checks, and what they have found together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from allranks.preflight.model import Check, Finding, Grade, Node, Seen

#: In the folder of a run: what was found before it started.
FILE = "preflight.json"


@dataclass(frozen=True)
class Result:
    """A check with one of its findings."""

    check: Check
    finding: Finding

    def to_json(self) -> dict[str, Any]:
        """Return both as plain JSON; ``host`` is empty for what is about the job."""
        found = {**asdict(self.finding), "grade": self.finding.grade.value}
        return {"check": self.check.name, **found, "why": self.finding.why or self.check.why}


@dataclass(frozen=True)
class Report:
    """All that was found, in the order of the checks.

    Attributes:
        results: what was found.
        nodes: what is known of the nodes.
        seconds: how long it took.
    """

    results: tuple[Result, ...]
    nodes: tuple[Node, ...]
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether nothing has failed."""
        return not self.of(Grade.FAIL)

    def of(self, grade: Grade) -> list[Result]:
        """Return the results of a grade."""
        return [result for result in self.results if result.finding.grade is grade]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return {
            "good": self.is_good,
            "seconds": round(self.seconds, 3),
            "checks": [result.to_json() for result in self.results],
            "nodes": [
                {"node": node.number, "host": node.host, "facts": dict(node.facts), "errors": dict(node.errors)}
                for node in self.nodes
            ],
        }


def run_checks(checks: Iterable[Check], seen: Seen) -> tuple[Result, ...]:
    """Run checks on what is known; a fix about a node also says how to go on without it, where that is possible."""
    found = ((check, finding) for check in checks for finding in check.find(seen))
    return tuple(Result(check, _with_a_way_out(finding, seen.without)) for check, finding in found)


def _with_a_way_out(finding: Finding, without: str) -> Finding:
    if not (finding.exclude and without):
        return replace(finding, exclude="")
    return replace(finding, fix=f"{finding.fix}; or {without.format(finding.exclude)}")
