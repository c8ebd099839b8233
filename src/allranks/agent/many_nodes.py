"""Runs the ranks of one of several nodes, together with those of the other nodes.

The :class:`Coordinator` in node 0's agent decides when all nodes start, end and restart their ranks.
"""

from __future__ import annotations

import resource
import signal
import socket
from pathlib import Path

from allranks import contract
from allranks.agent.nodes.client import CoordinatorClient, torch_to_match
from allranks.agent.nodes.coordinator import Coordinator
from allranks.agent.stop import StopRequest, StopRequestedError
from allranks.agent.stores import Stores
from allranks.agent.workers.fork_server import ForkClient
from allranks.agent.workers.group import Outcome, WorkerGroup
from allranks.record import run_key
from allranks.record.events import EventWriter
from allranks.record.spec import NodeSpec

_POLL_SECONDS = 0.05
#: Grace period for ranks when a node is lost and the others continue: without its ranks they cannot save a checkpoint.
_WITHOUT_A_NODE_SECONDS = contract.scaled_wait(5.0)
#: How long node 0 waits for the others at the end of the attempt, beyond the grace period of their ranks.
_LEAVE_SECONDS = 10.0


def run_many_nodes(
    node: NodeSpec,
    listener: socket.socket | None,
    stores: Stores,
    stop: StopRequest,
    fork_client: ForkClient,
    group: WorkerGroup,
    events: EventWriter,
) -> Outcome:
    """Run this node's ranks through all restarts; return the outcome of the attempt, which is the same on all nodes.

    No rank is left when this returns or raises. Node 0 has the ``listener``, to which the other agents connect.

    Raises:
        LaunchError: the other agents cannot be reached, the process limit is reached, torch is needed and missing,
           or the run has no key.
        StopRequestedError: a stop of the run was requested.
    """
    known = run_key.read(Path(node.run_dir, contract.KEY_FILE))
    coordinator = None
    if listener:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # Each node is a connection.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        coordinator = Coordinator(node, known, listener, stores, torch_to_match())
    client = CoordinatorClient(node, known, stop, events, coordinator)
    fork_client.coordinator = client
    why: str | None = "its agent failed"
    try:
        client.join(group.poll)
        _drive(node, group, client)
        group.abort()
        why = None
    except StopRequestedError as error:
        why = None
        if client.is_spare:
            why = f"it was to end: {error}"
        else:
            client.request_stop(stop.signal or signal.SIGTERM, str(error))
        group.abort()
        if client.outcome is None:
            raise
    except Exception as error:
        why = str(getattr(error, "what", error))
        group.abort()
        raise
    finally:
        client.leave(group.poll, node.stop_timeout + _LEAVE_SECONDS, why)
    assert client.outcome
    return client.outcome


def _drive(node: NodeSpec, group: WorkerGroup, client: CoordinatorClient) -> None:
    """Run generations of ranks until the attempt is over on all nodes."""
    while True:
        client.ready()
        while not (client.generation or client.outcome):
            group.poll(_POLL_SECONDS)
        if client.outcome or not client.generation:
            return
        group.start(client.generation)
        is_reported = False
        while not client.again:
            group.poll(_POLL_SECONDS)
            if client.outcome:
                return
            is_reported = is_reported or _take_part(node, group, client)
            if not is_reported:
                client.report_quiet(group.hangs.quiet)
        group.clear_failure()
        group.pause(client.again["restart"], client.again["rank"], counted=client.again["counted"])


def _take_part(node: NodeSpec, group: WorkerGroup, client: CoordinatorClient) -> bool:
    """End the ranks if one failed on any node; if none is left, report that to the coordinator and return True."""

    def patience() -> float:
        return min(node.stop_timeout, _WITHOUT_A_NODE_SECONDS) if client.continues_without else node.stop_timeout

    if failure := group.first_failure:
        client.failed(*failure)
    cut = group.is_running and bool(failure or client.shall_end)
    if cut:
        if not failure:
            group.clear_failure()
        group.end(patience=patience)
    if group.is_running:
        return False
    client.over(cut=cut, wants_to_continue=group.left_to_continue is not None)
    return True
