"""Whether nodes can be looked at at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from allranks.preflight.model import Finding, Grade, Seen, passed, skipped
from allranks.preflight.registry import on_the_whole


@on_the_whole(
    "nodes",
    why="a node that cannot be reached, or whose environment cannot be set up, gets no ranks",
    facts=("host",),
)
def nodes(seen: Seen) -> Iterator[Finding]:
    """Look at whether each node has told of itself."""
    if not seen.nodes:
        yield skipped(seen.why_no_nodes)
    can_do_without = _can_do_without(seen)
    for node in seen.nodes:
        if node.failure and node.failure.grade is Grade.FAIL and can_do_without:
            yield replace(node.failure, grade=Grade.WARN, why="the job begins without it")
        elif node.failure:
            yield node.failure
        elif "host" in node.facts:
            yield passed(f"Python {node.facts['host']['python']}", host=node.host)
        else:
            yield skipped(node.errors["host"], host=node.host)


def _can_do_without(seen: Seen) -> bool:
    """Tell whether the job begins without the nodes that have failed: not without the first, where all meet."""
    failed = [node.number for node in seen.nodes if node.failure]
    needed = seen.plan.min_nodes or seen.plan.nnodes
    return 0 not in failed and len(seen.nodes) - len(failed) >= needed
