"""The ranks of a job of one node: started, watched, ended and restarted."""

from __future__ import annotations

import signal

from allranks.agent.backoff import Backoff
from allranks.agent.generation import alone
from allranks.agent.group import RankGroup
from allranks.agent.stores import Stores
from allranks.agent.torch_import import TorchImport
from allranks.contract import NodeSpec

_LOOK_SECONDS = 0.05


def run_one_node(node: NodeSpec, group: RankGroup, torch: TorchImport) -> bool:
    """Run the ranks with all their restarts; none is left when this returns.

    Args:
        node: the node's orders.
        group: the ranks.
        torch: begun when a rank connects to the store, unless it is over by then.

    Returns:
        Whether the ranks that were started last have met.

    Raises:
        LaunchError: the port is not free, no further process is allowed, or torch is needed and missing.
        StopRequestedError: the run shall end.
    """
    stores = Stores(torch, node.master_port)
    backoff = Backoff(node.restart_delay)
    for restart in range(node.max_restarts + 1):
        group.start(alone(node, restart, stores.open(node.master_addr)))
        _watch(group, stores)
        if group.first_failure is None or restart == node.max_restarts:
            break
        blamed, _ = group.first_failure
        group.forgive()
        group.end(signal.SIGTERM)
        group.pause(restart + 1, backoff.delay(group.started), blamed)
    group.end(signal.SIGTERM)
    return stores.was_used


def _watch(group: RankGroup, stores: Stores) -> None:
    """Wait until a rank has failed or all have ended."""
    group.look(0)  # At those that have ended while others were started.
    while group.is_running and not group.first_failure:
        stores.tick()
        group.look(_LOOK_SECONDS)
