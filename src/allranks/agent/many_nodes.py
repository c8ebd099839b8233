"""The ranks of one of several nodes: started, watched, ended and restarted together with those of the other nodes.

The :class:`Coordinator` in node 0's agent decides what is to be done, for all nodes alike.
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
#: What ranks get to exit when a node is lost and others continue: they wait for its ranks, and cannot save together.
_WITHOUT_A_NODE_SECONDS = contract.scaled_wait(5.0)
#: What node 0 waits for the others when the attempt is over, beyond what their ranks may take to end.
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
    """Run this node's ranks, with all restarts of all nodes, and return how the attempt has ended on all of them.

    No rank is left when this returns or raises. Node 0 has the ``listener``, to which the other agents connect.

    Raises:
        LaunchError: the other agents cannot be reached, no further process is allowed, torch is needed and missing,
            or the run has no key.
        StopRequestedError: the run is to stop.
    """
    known = run_key.read(Path(node.run_dir, contract.KEY_FILE))
    coordinator = None
    if listener:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # Each other node is a connection.
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
    """Run one generation after the other, until the attempt is over on all nodes."""
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
    """End the ranks if one has failed, here or elsewhere; return whether none is left, which is then reported."""

    def patience() -> float:
        return min(node.stop_timeout, _WITHOUT_A_NODE_SECONDS) if client.goes_on_without else node.stop_timeout

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
