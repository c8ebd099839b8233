"""The ranks of one of several nodes: started, watched, ended and restarted together with those of the other nodes.

What is to be done is decided by the :class:`Hub` in node 0's agent, for all nodes alike.
"""

from __future__ import annotations

import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from allranks import contract
from allranks.agent.backoff import Backoff
from allranks.agent.generation import Generation
from allranks.agent.group import RankGroup
from allranks.agent.hub import Hub
from allranks.agent.member import Again, Meeting, Member
from allranks.agent.outcome import Outcome
from allranks.agent.places import not_started
from allranks.agent.stop import Stop, StopRequestedError
from allranks.agent.stores import Stores
from allranks.agent.torch_import import TorchImport
from allranks.contract import NodeSpec
from allranks.runs import key
from allranks.runs.events import EventWriter

_LOOK_SECONDS = 0.05
#: What ranks get to leave when a node is lost and others go on: they wait for its ranks, and cannot save together.
_WITHOUT_A_NODE_SECONDS = contract.scaled_wait(5.0)
#: What node 0 waits for the others when the attempt is over, beyond what their ranks may take to end.
_LEAVE_SECONDS = 10.0


class Driver:
    """Drives the ranks of one of several nodes.

    Args:
        node: the node's orders.
        group: the ranks.
        member: this node among the nodes.
    """

    def __init__(self, node: NodeSpec, group: RankGroup, member: Member) -> None:
        self._node = node
        self._group = group
        self._member = member
        self._backoff = Backoff(node.restart_delay)

    def run(self) -> None:
        """Run one generation after the other, until the attempt is over on all nodes.

        Raises:
            LaunchError: no further process is allowed.
            StopRequestedError: the run shall end.
        """
        while meeting := self._meet():
            self._group.start(self._generation(meeting))
            if not (again := self._watch()):
                break
            self._group.forgive()
            delay = self._backoff.delay(self._group.started) if again.counted else 0.0
            self._group.pause(again.restart, delay, again.rank)

    def _meet(self) -> Meeting | None:
        """Say that this node is ready, and wait for the next generation; None if the attempt is over."""
        member = self._member
        member.ready()
        while not (member.meeting or member.outcome):
            self._group.look(_LOOK_SECONDS)
        return None if member.outcome else member.meeting

    def _generation(self, meeting: Meeting) -> Generation:
        place, first = meeting.place(self._node.node)
        return Generation(
            restart=meeting.number,
            node_rank=place,
            nodes=len(meeting.nodes),
            world_size=meeting.world_size,
            ranks=tuple(range(first, first + self._node.nproc_per_node)),
            master_addr=meeting.address,
            master_port=meeting.port,
        )

    def _watch(self) -> Again | None:
        """Take part in a generation until it is decided what follows; None if the attempt is over."""
        member, is_reported = self._member, False
        while not member.again:
            self._group.look(_LOOK_SECONDS)
            if member.outcome:
                return None
            is_reported = is_reported or self._take_part()
        return member.again

    def _take_part(self) -> bool:
        """End the ranks if one has failed, here or elsewhere; return whether none is left, and has been reported so."""
        group, member = self._group, self._member
        if failure := group.first_failure:
            member.failed(*failure)
        cut = group.is_running and bool(failure or member.shall_end)
        if cut and not failure:
            group.forgive()
        if cut:
            group.end(signal.SIGTERM, self._patience)
        if group.is_running:
            return False
        member.over(cut=cut, wants_to_continue=group.wants_to_continue)
        return True

    def _patience(self) -> float:
        most = self._node.stop_timeout
        return min(most, _WITHOUT_A_NODE_SECONDS) if self._member.goes_on_without else most


def run_many_nodes(
    node: NodeSpec,
    listener: socket.socket | None,
    torch: TorchImport,
    stop: Stop,
    group: RankGroup,
    events: EventWriter,
) -> Outcome:
    """Run this node's ranks, with all restarts of all nodes, and return how the attempt has ended on all of them.

    Args:
        node: the node's orders.
        listener: where the other agents dial; node 0 has it.
        torch: begun on node 0 when a rank connects, unless it is over by then.
        stop: requests to end the run.
        group: the ranks; none is left when this returns or raises.
        events: where to tell what happens.

    Raises:
        LaunchError: the other agents cannot be reached, no further process is allowed, torch is needed and missing,
            or the run has no key.
        StopRequestedError: the run shall end.
    """
    known = key.read(Path(node.run_dir, contract.KEY_FILE))
    hub = Hub(node, known, listener, _stores(torch), partial(not_started, node)) if listener else None
    member = Member(node, known, stop, events, hub)
    group.attend(member)
    why: str | None = "its agent failed"
    try:
        member.join(group.look)
        Driver(node, group, member).run()
        group.give_up()
        why = None
    except StopRequestedError as error:
        why = None
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


def _stores(torch: TorchImport) -> Stores:
    """Return the stores of all nodes' ranks; let this process hold as many connections as there may be."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return Stores(torch)


def _quietly(look: Callable[[float], None]) -> Callable[[float], None]:
    """Wait although the run is to stop: that is under way."""

    def wait(seconds: float) -> None:
        with suppress(StopRequestedError):
            look(seconds)

    return wait
