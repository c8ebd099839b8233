"""What checks of the network between nodes ask: is there anything to be met, and who was?"""

from __future__ import annotations

from typing import Any

from allranks.preflight.model import Node, Seen


def told(seen: Seen, fact: str) -> dict[str, Any]:
    """Return a fact of all nodes that have told it and that it is about, by host."""
    return {node.host: node.facts[fact] for node in seen.nodes if node.facts.get(fact) is not None}


def why_nothing(seen: Seen, *facts: str) -> str:
    """Say why there is nothing to look at between nodes; nothing if there is."""
    if not seen.nodes:
        return seen.why_no_nodes
    if len(seen.nodes) == 1:
        return "one node meets no other"
    for fact in facts:
        if not told(seen, fact):
            errors = [node.errors[fact] for node in seen.nodes if fact in node.errors]
            return errors[0] if errors else "nobody knows yet where the nodes are to meet"
    return ""


def has_met(node: Node) -> bool:
    """Tell whether a node has reached the first one, or, if it is that, has been reached."""
    found = node.facts.get("reach")
    return found is not None and found["error"] is None and bool(node.number or found["came"])
