"""What checks are given, made from facts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.checks.model import Finding, Node, Seen
from allranks.checks.registry import all_checks
from allranks.clusters.base import Request
from allranks.clusters.local_plan import LocalPlanning
from allranks.job.spec import Job


def seen_of(facts: Mapping[str, Mapping[str, Any]], job: Mapping[str, Any] | None = None, **more: Any) -> Seen:
    """Return what checks are given.

    Args:
        facts: the facts of each node, by its host.
        job: the job as a job file has it, on this machine; default: one that runs ``true``.
        more: fields of ``Seen`` that are not as usual.
    """
    made = Job(**{"binary": "true", **(job or {})})
    plan = LocalPlanning(Request(made, Path("/"), Path("/runs/x"), {"CUDA_VISIBLE_DEVICES": ""})).plan()
    nodes = tuple(Node(number, host, found) for number, (host, found) in enumerate(facts.items()))
    return Seen(**{"job": made, "plan": plan, "environ": {}, "nodes": nodes, **more})


def found(name: str, seen: Seen) -> list[Finding]:
    """Return what the check of that name finds."""
    (check,) = [check for check in all_checks() if check.name == name]
    return [*check.find(seen)]
