"""Who takes part in a generation of ranks: places are in the order of their ranks, and spare nodes wait for one."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

from allranks import contract
from allranks.contract import NodeSpec


def filled(places: Sequence[int], ready: Collection[int]) -> list[int]:
    """Return who is to have each place: who has it now or, where that node is not ready, a spare one that is.

    Args:
        places: the nodes that have the places now; a place whose node is lost keeps its number.
        ready: the nodes that are ready.
    """
    spares = iter(sorted(set(ready) - set(places)))
    return [node if node in ready else next(spares, node) for node in places]


def not_started(node: NodeSpec) -> dict[int, tuple[str, str]]:
    """Return the nodes whose agents the launcher could not start: their hosts, and why.

    Where all are needed it starts none without the others; then nothing is read, however often this is asked.
    """
    if node.needs_all:
        return {}
    path = Path(node.run_dir, contract.node_dir(node.attempt, 0), contract.NOT_STARTED)
    try:
        told = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {one["node"]: (one["host"], one["why"]) for one in told}
    except (OSError, ValueError):
        return {}  # All have been started, as far as is known yet, or the file is being written.
