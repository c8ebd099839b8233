"""Preflight: checks a job and its nodes before it starts, and reports the results."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from allranks.checks.model import Check, Grade, Node, Result, Seen
from allranks.checks.probe import probe

if TYPE_CHECKING:
    from allranks.checks.waiting import Waiting
    from allranks.clusters.base import ClusterKind
    from allranks.launch.submit import Launch
    from allranks.plan.plan import Plan

#: In the directory of a run: what was found before it started.
FILE = "preflight.json"


class Report(NamedTuple):
    """The results in the order of the checks, what is known of the nodes, and how long it took."""

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
    """Run checks on what is known; a fix about a node also says how to run without it, where that is possible."""
    results = []
    for check in checks:
        for found in check.find(seen):
            if found.exclude and seen.without:
                found = replace(found, fix=f"{found.fix}; or {seen.without.format(found.exclude)}")
            else:
                found = replace(found, exclude="")
            results.append(Result(check, found))
    return tuple(results)


def preflight(
    checks: Sequence[Check],
    kind: ClusterKind,
    launch: Launch,
    plan: Plan,
    folder: Path,
    *,
    is_prepared: bool = True,
    has_target: bool = True,
    is_submitted: bool = False,
    waiting: Waiting | None = None,
    timeout: float = 0.0,
) -> Report:
    """Check a job and its nodes; :class:`Seen` describes the arguments that are not here.

    Args:
        checks: from :func:`allranks.checks.registry.chosen_for`.
        kind: the kind of cluster that made the plan.
        launch: what is or would be launched.
        plan: its plan.
        folder: a directory here for what the nodes may need: that of the run, if there is one.
        waiting: how to wait for nodes of a scheduler; None: none are requested.
        timeout: seconds that ranks wait for each other in the self-test.

    Raises:
        LaunchError: what reaches the nodes is not installed here.
    """
    began = time.monotonic()
    facts = list(dict.fromkeys(fact for check in checks for fact in check.facts))
    word = secrets.token_hex(8)
    nodes: tuple[Node, ...] = ()
    why = "no check probes nodes"
    if facts:
        nodes, why = probe(kind, launch, plan, facts, folder, word=word, is_prepared=is_prepared, waiting=waiting)
    seen = Seen(
        launch.job, plan, launch.environ, nodes, why, is_prepared, has_target, word, is_submitted, without=kind.without
    )
    results = run_checks([check for check in checks if not check.needs_trial], seen)
    if of_trial := [check for check in checks if check.needs_trial]:
        from allranks.checks.selftest import with_trial  # Not before each run, whose checks need none.
        from allranks.checks.waiting import Patience, noted

        with noted() as signals:
            watcher = Patience(kind, waiting, signals)
            seen = with_trial(seen, results, kind, launch._replace(runs_folder=folder), timeout, watcher)
            results += run_checks(of_trial, seen)
    return Report(results, seen.nodes, time.monotonic() - began)
