"""Ranks that need no torch do not wait for the agent to import it: most have ended before it would have.

The agent needs torch for two things: to serve the store at which ranks meet, and to start them anew. So the first
generation is started and watched without it, while the agent listens where the store would be. When somebody dials
there, or a rank that may be restarted has failed, torch is imported beside the running ranks, and torch's elastic
agent takes over.
"""

from __future__ import annotations

import signal
import socket

from allranks.agent.generation import first_alone
from allranks.agent.group import RankGroup
from allranks.agent.listener import has_caller, port_of
from allranks.agent.torch_import import TorchImport
from allranks.contract import NodeSpec

_LOOK_SECONDS = 0.05


def run_without_torch(node: NodeSpec, group: RankGroup, listener: socket.socket, torch: TorchImport) -> bool:
    """Start the first generation and see it to its end; return False if torch's agent must take over before that.

    Args:
        node: the node's orders.
        group: the ranks.
        listener: the socket where the ranks meet.
        torch: begun when torch turns out to be needed, and over when this returns False.

    Raises:
        LaunchError: the system allows no further process.
        StopRequestedError: the run shall end.
    """
    group.start(first_alone(node, port_of(listener)))
    while group.is_running or group.failed:
        if group.failed and not node.max_restarts:
            group.end(signal.SIGTERM)
            break
        if torch.is_over:
            return False
        if not torch.has_begun and (group.failed or has_caller(listener)):
            torch.begin()
        group.look(_LOOK_SECONDS)
    group.look(0)
    return True
