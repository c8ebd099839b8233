"""The agents of several nodes drive the ranks of one job together, each through torch's elastic agent.

What is to be done is decided by the :class:`Hub` in node 0's agent, for all nodes alike. Each generation of ranks
meets at a new store, which that agent serves on a free port: there is no key of an earlier generation to be found.
"""

from __future__ import annotations

import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from allranks import contract
from allranks.agent.elastic import WarmElasticAgent, describe
from allranks.agent.group import RankGroup
from allranks.agent.hub import Hub
from allranks.agent.listener import listen_everywhere, port_of
from allranks.agent.member import Meeting, Member
from allranks.agent.outcome import Outcome
from allranks.agent.places import not_started
from allranks.agent.rendezvous import serve
from allranks.agent.stop import Stop, StopRequestedError
from allranks.contract import NodeSpec
from allranks.runs.events import EventWriter

_LOOK_SECONDS = 0.05
#: What ranks get to leave when a node is lost and others go on: they wait for its ranks, and cannot save together.
_WITHOUT_A_NODE_SECONDS = contract.scaled_wait(5.0)
#: What node 0 waits for the others when the attempt is over, beyond what their ranks may take to end.
_LEAVE_SECONDS = 10.0


class _OverError(Exception):
    """The attempt is over, on all nodes."""


class Stores:
    """Serves the store of one generation of ranks after the other, on this node."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None

    def open(self) -> int:
        """Open a new store in place of the last one; return its port.

        Raises:
            LaunchError: no port is free.
        """
        self._store = None
        listener = listen_everywhere(None, "end what holds so many ports of this machine")
        port = port_of(listener)
        self._store = serve("127.0.0.1", port, listener.detach())
        return port

    def tell_of_loss(self) -> None:
        """Tell the ranks that one of them is gone, so that nobody waits for it."""
        if self._store is not None:
            self._store.set(contract.RANK_GONE, "1")


class ManyNodesRendezvous(RendezvousHandler):
    """The rendezvous as torch's agent sees it: this node says that it is ready, and hears with whom.

    Args:
        node: the node's orders.
        member: this node among the nodes.
        look: waits so many seconds and hears meanwhile.
    """

    def __init__(self, node: NodeSpec, member: Member, look: Callable[[float], object]) -> None:
        self._node = node
        self._member = member
        self._look = look

    def get_backend(self) -> str:
        """Return the name that torch's events carry."""
        return "allranks"

    @property
    def use_agent_store(self) -> bool:
        """Tell the ranks that they are all clients of an agent's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next generation; the agents themselves need no store.

        Raises:
            _OverError: there is none.
        """
        self._member.ready()
        while self._member.meeting is None:
            if self._member.outcome:
                raise _OverError
            self._look(_LOOK_SECONDS)
        meeting = self._member.meeting
        place, _ = meeting.place(self._node.node)
        return RendezvousInfo(
            HashStore(), place, len(meeting.nodes), RendezvousStoreInfo(meeting.address, meeting.port)
        )

    def is_closed(self) -> bool:
        """Tell whether the attempt is over."""
        return self._member.outcome is not None

    def set_closed(self) -> None:
        """Do nothing: the hub tells everybody."""

    def num_nodes_waiting(self) -> int:
        """Return 1 when all nodes are to begin another generation, for which torch's agent then restarts."""
        return int(self._member.again is not None)

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self._node.run_id

    def shutdown(self) -> bool:
        """Do nothing: there is nothing to be closed."""
        return True


class ManyNodesAgent(WarmElasticAgent):
    """Drives the ranks of one of several nodes.

    Args:
        node: the node's orders.
        group: the ranks.
        events: where to tell what happens.
        member: this node among the nodes.
    """

    def __init__(self, node: NodeSpec, group: RankGroup, events: EventWriter, member: Member) -> None:
        rendezvous = ManyNodesRendezvous(node, member, group.look)
        super().__init__(describe(node, rendezvous), node, group, events)
        self._member = member
        self._is_reported = False

    def _assign_worker_ranks(self, *_: Any, **__: Any) -> list[Worker]:
        """Number the ranks from what all nodes were told."""
        first = self._meeting.place(self._node.node)[1]
        size = self._meeting.world_size
        numbers = range(self._node.nproc_per_node)
        return [
            Worker(local_rank=local, global_rank=rank, role_rank=rank, world_size=size, role_world_size=size)
            for local, rank in ((local, first + local) for local in numbers)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._is_reported = False
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._group.look(_LOOK_SECONDS)
        if self._member.outcome:
            raise _OverError
        if not self._is_reported:
            self._take_part()
        return RunResult(WorkerState.HEALTHY)

    def _take_part(self) -> None:
        """End the ranks when one has failed, here or elsewhere, and say when none is left."""
        group, member = self._group, self._member
        if failure := group.first_failure:
            member.failed(*failure)
        cut = group.is_running and bool(failure or member.shall_end)
        if cut and not failure:
            group.forgive()
        if cut:
            group.end(signal.SIGTERM, self._patience)
        if not group.is_running:
            member.over(cut=cut, wants_to_continue=group.wants_to_continue)
            self._is_reported = True

    def _patience(self) -> float:
        most = self._node.stop_timeout
        return min(most, _WITHOUT_A_NODE_SECONDS) if self._member.goes_on_without else most

    def _exit_barrier(self) -> None:
        """Wait for nobody: when the attempt is over, it is so on all nodes."""

    # --- restarts, which all nodes count alike ---

    @property
    def _meeting(self) -> Meeting:
        assert self._member.meeting
        return self._member.meeting

    def _restart_count(self) -> int:
        return self._member.again.restart if self._member.again else self._meeting.number

    def _blamed_rank(self) -> int | None:
        return self._member.again.rank if self._member.again else None

    def _restart_delay(self) -> float:
        counts = self._member.again is not None and self._member.again.counted
        return super()._restart_delay() if counts else 0.0


def run_many_nodes(
    node: NodeSpec, listener: socket.socket | None, stop: Stop, group: RankGroup, events: EventWriter
) -> Outcome:
    """Run this node's ranks, with all restarts of all nodes, and return how the attempt has ended on all of them.

    Args:
        node: the node's orders.
        listener: where the other agents dial; node 0 has it.
        stop: requests to end the run.
        group: the ranks; none is left when this returns or raises.
        events: where to tell what happens.

    Raises:
        LaunchError: the other agents cannot be reached, or no further process is allowed.
        StopRequestedError: the run shall end.
    """
    hub = Hub(node, listener, _prepared_stores(), partial(not_started, node)) if listener else None
    member = Member(node, stop, events, hub)
    group.attend(member)
    why: str | None = "its agent failed"
    try:
        member.join(group.look)
        ManyNodesAgent(node, group, events, member).run()
    except (_OverError, StopRequestedError) as error:
        why = None
        if isinstance(error, StopRequestedError):
            if member.is_spare:
                why = f"it was to end: {error}"
            else:
                member.ask_to_stop(stop.signal or signal.SIGTERM, str(error))
            group.give_up()
        if member.outcome is None:
            raise
    except Exception as error:
        why = str(getattr(error, "what", error))
        group.give_up()
        raise
    finally:
        member.leave(_quietly(group.look), node.stop_timeout + _LEAVE_SECONDS, why)
    assert member.outcome
    return member.outcome


def _prepared_stores() -> Stores:
    """Let this process hold a connection to each rank and each agent, as many as there may be."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return Stores()


def _quietly(look: Callable[[float], None]) -> Callable[[float], None]:
    """Wait although the run is to stop: that is under way."""

    def wait(seconds: float) -> None:
        with suppress(StopRequestedError):
            look(seconds)

    return wait
