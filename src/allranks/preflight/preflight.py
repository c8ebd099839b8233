"""Preflight: what is checked of a job before it starts, from the choice of checks to the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.preflight.looking import look
from allranks.preflight.model import Check, Seen
from allranks.preflight.report import Report, run_checks

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind
    from allranks.clusters.launch import Launch
    from allranks.plan.plan import Plan

_NOT_YET = "there are no nodes before {} gives some; allranks check in an allocation looks at them"


def preflight(
    checks: Sequence[Check],
    kind: ClusterKind,
    launch: Launch,
    plan: Plan,
    folder: Path,
    *,
    is_prepared: bool = True,
    has_target: bool = True,
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

    Raises:
        LaunchError: what reaches the nodes is not installed here.
    """
    began = time.monotonic()
    facts = list(dict.fromkeys(fact for check in checks for fact in check.facts))
    nodes = look(kind, launch, plan, facts, folder, is_prepared=is_prepared) if facts else ()
    why = _NOT_YET.format(plan.cluster) if nodes is None else "no check looks at nodes"
    seen = Seen(launch.job, plan, launch.folder, launch.environ, nodes or (), why, is_prepared, has_target)
    results = run_checks(checks, seen)
    return Report(results, seen.nodes, time.monotonic() - began)
