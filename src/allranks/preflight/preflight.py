"""Preflight: what is checked of a job before it starts, from the choice of checks to the report."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.preflight.looking import look
from allranks.preflight.model import Check, Node, Seen
from allranks.preflight.report import Report, run_checks

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind
    from allranks.clusters.launch import Launch
    from allranks.plan.plan import Plan
    from allranks.preflight.waiting import Waiting


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
    """Look at a job and its nodes.

    Args:
        checks: what to look at, from :func:`allranks.preflight.registry.chosen`.
        kind: the kind of cluster that made the plan.
        launch: what is, or would be, launched.
        plan: the plan.
        folder: a folder here for what the nodes may need: that of the run, if there is one.
        is_prepared: whether lines of ``environment.node_setup`` are run on the nodes.
        has_target: whether the job says what to run.
        is_submitted: whether the job is submitted next, if nothing is against it.
        waiting: how to wait for nodes that a scheduler has to be asked for; None: it is not asked.
        timeout: seconds that ranks wait for each other, where checks need them.

    Raises:
        LaunchError: what reaches the nodes is not installed here.
    """
    began = time.monotonic()
    facts = list(dict.fromkeys(fact for check in checks for fact in check.facts))
    word = secrets.token_hex(8)
    found: tuple[Node, ...] | str = ()
    if facts:
        found = look(kind, launch, plan, facts, folder, word=word, is_prepared=is_prepared, waiting=waiting)
    nodes, why = ((), found) if isinstance(found, str) else (found, "no check looks at nodes")
    seen = Seen(
        *(launch.job, plan, launch.environ, nodes, why, is_prepared, has_target, word, is_submitted),
        without=kind.without,
    )
    results = run_checks([check for check in checks if not check.needs_trial], seen)
    if trying := [check for check in checks if check.needs_trial]:
        from allranks.preflight.trials import tried  # Not before each run, whose checks need none.
        from allranks.preflight.waiting import Patience, noted

        with noted() as signals:
            watcher = Patience(kind, waiting, signals)
            seen = tried(seen, results, kind, replace(launch, runs_folder=folder), timeout, watcher)
            results += run_checks(trying, seen)
    return Report(results, seen.nodes, time.monotonic() - began)
