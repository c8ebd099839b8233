"""Whether nodes can be looked at at all."""

from __future__ import annotations

from collections.abc import Iterator

from allranks.preflight.model import Finding, Seen, passed, skipped
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
    for node in seen.nodes:
        if node.failure:
            yield node.failure
        elif "host" in node.facts:
            yield passed(f"Python {node.facts['host']['python']}", host=node.host)
        else:
            yield skipped(node.errors["host"], host=node.host)
