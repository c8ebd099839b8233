"""Where the agents of several nodes meet: a part of node 0's agent, which hears all of them and decides for all.

A generation of ranks begins when the nodes are there, and ends on all nodes together: when a rank fails, when a node
is lost, when one that was missing comes, or when all ranks have ended. What follows is decided when every node has
ended its ranks: another generation, or the end. So all nodes count restarts alike and name the same first failure.

torch's dynamic rendezvous is not used for this: it takes a node for dead when clocks differ by more than the
keep-alive (seen: both nodes then go on alone, each in a world of its own), looks around once a second, counts restarts
on each node by itself and numbers nodes by the text of their names.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from allranks import contract
from allranks.agent.channel import Channel
from allranks.agent.messages import Message
from allranks.agent.outcome import PREEMPTED, Outcome, failed, succeeded
from allranks.agent.places import filled
from allranks.agent.strangers import Strangers
from allranks.contract import NodeSpec

#: How long nodes are waited for that have not come; importing torch can take minutes where many nodes do it at once.
JOIN_SECONDS = 600.0
#: How much longer all nodes are waited for when there are enough of them.
LAST_CALL_SECONDS = 5.0
#: Connections that are accepted before what was said is heard again.
_MOST_AT_ONCE = 64


@dataclass
class _Peer:
    """A node's agent.

    Attributes:
        channel: to it.
        node: its number.
        host: its name.
        ranks: how many it has.
        torch: its version of torch; None if it has none.
        is_ready: whether it waits for the next generation.
        failure: of its ranks, the first: global rank, code, and when by its clock.
        report: what it said when all its ranks had ended.
        behind: the least seconds from its time of sending to our time of reading: how its clock differs from ours.
        why: what it gave as the reason to leave.
    """

    channel: Channel
    node: int
    host: str
    ranks: int
    torch: str | None
    is_ready: bool = False
    failure: Message | None = None
    report: Message | None = None
    behind: float = math.inf
    why: str | None = None

    @property
    def name(self) -> str:
        return name_of(self.node, self.host)

    @property
    def is_fine(self) -> bool:
        """Whether its ranks have all ended by themselves, and well."""
        return self.report is not None and self.failure is None and not self.report["cut"]


@dataclass
class _Round:
    """A generation of ranks: the nodes it began with, whether one of them was lost, and whether it is being ended."""

    nodes: Collection[int] = ()
    has_lost: bool = False
    is_ending: bool = False


class Stores(Protocol):
    """Where the ranks of a generation meet, one after the other."""

    def open(self, address: str | None) -> int:
        """Open a new store in place of the last one, at an address of ours or, if None, at all; return its port."""

    def tick(self) -> None:
        """Do what there is to do for the store that is open."""

    def tell_of_loss(self) -> None:
        """Tell the ranks that one of them is gone, so that nobody waits for it."""

    @property
    def was_used(self) -> bool:
        """Whether ranks have met at the store that is open."""


class Hub:
    """Hears the agents of all nodes, and tells them what to do. It waits for nothing: see :meth:`tick`.

    Args:
        node: the orders of node 0.
        key: of the run.
        listener: where the other agents dial.
        stores: of the generations of ranks.
        not_started: gives the nodes that cannot come, as far as somebody knows: their hosts, and why.
    """

    def __init__(
        self,
        node: NodeSpec,
        key: bytes,
        listener: socket.socket,
        stores: Stores,
        not_started: Callable[[], Mapping[int, tuple[str, str]]] = dict,
    ) -> None:
        self._node = node
        self._key = key
        self._listener = listener
        self._stores = stores
        self._strangers = Strangers()
        self._peers: dict[int, _Peer] = {}
        self._gone: dict[int, tuple[str, str]] = {}  # node -> its name, and why it was lost
        self._not_started = not_started
        self._places: list[int] = [*range(node.places)]  # who has them, in the order of their ranks
        self._round: _Round | None = None
        self._number = 0
        self._failures = 0
        self._awaits_own = False
        self._is_over = False
        self._outcome: Outcome | None = None
        self._begin_gathering()
        listener.setblocking(False)

    @property
    def descriptors(self) -> list[Any]:
        """What to select on: when one of them can be read, there is something to do."""
        return [self._listener, *self._strangers.channels, *(peer.channel for peer in self._peers.values())]

    @property
    def is_alone(self) -> bool:
        """Whether no other agent is connected any more."""
        return all(peer.node == self._node.node for peer in self._peers.values())

    def connect(self) -> socket.socket:
        """Return a connection for this node's own agent, which is treated as all others are."""
        ours, theirs = socket.socketpair()
        self._awaits_own = True  # Before all others: whose torch is another one is turned away, and not this node.
        self._let_in(ours)
        return theirs

    def tick(self) -> None:
        """Do what there is to do."""
        self._accept()
        for peer in list(self._peers.values()):
            for message in peer.channel.receive():
                self._take(peer, message)
            peer.channel.flush()
            if peer.channel.lost:
                self._lose(peer)
        if not self._is_over:
            self._stores.tick()
            self._judge() if self._round else self._gather()

    def finish(self, outcome: Outcome) -> None:
        """Tell all agents how the attempt has ended, unless that is known."""
        if not self._is_over:
            self._is_over, self._outcome = True, outcome
            self._tell(self._peers, "outcome", **asdict(outcome))

    def close(self) -> None:
        """Let go of everybody."""
        self._strangers.close()
        for peer in self._peers.values():
            peer.channel.close()
        self._listener.close()

    # --- who is there ---

    def _accept(self) -> None:
        try:
            for _ in range(0 if self._awaits_own else _MOST_AT_ONCE):
                self._let_in(self._listener.accept()[0])
        except OSError:
            pass  # Nobody else has dialled, or who did has given up.
        for channel, messages in self._strangers.proven():
            self._admit(channel, *messages)

    def _let_in(self, connection: socket.socket) -> None:
        self._strangers.add(Channel(connection, self._key, is_hub=True, patient=self._node.needs_all))

    def _admit(self, channel: Channel, hello: Message, *more: Message) -> None:
        if why := self._why_not(hello):
            channel.send("refused", why=why)
            channel.close()
            return
        peer = _Peer(channel, hello["node"], hello["host"], hello["ranks"], hello["torch"])
        if why := self._other_torch(peer):
            self._turn_away(peer, why)
            return
        self._peers[peer.node] = peer
        self._awaits_own = self._awaits_own and peer.node != self._node.node
        self._gone.pop(peer.node, None)
        channel.send("welcome", host=socket.gethostname())
        if self._outcome:  # A spare may be late for a job of a second, which has not failed for that.
            channel.send("outcome", **asdict(self._outcome))
        for message in more:
            self._take(peer, message)

    def _why_not(self, hello: Message) -> str | None:
        if hello["kind"] != "hello":
            return "it has not said hello"
        if hello["attempt"] != self._node.attempt:
            return f"the agent there belongs to attempt {self._node.attempt}, and this one to {hello['attempt']}"
        if self._is_over and not self._outcome:
            return "the job is being stopped"
        if peer := self._peers.get(hello["node"]):
            return f"{peer.name} is there already"
        if hello["node"] >= self._node.nnodes:
            return f"the agent there expects {self._node.nnodes} nodes"
        return None

    def _other_torch(self, peer: _Peer) -> str | None:
        """Say how a node's version of torch differs from that of those who are here: ranks could hang, or worse.

        A node without torch is not turned away: either the ranks need none, or its agent says itself what is missing.
        """
        others = (here for here in self._peers.values() if here.torch and peer.torch)
        here = next((here for here in others if here.torch != peer.torch), None)
        return f"it has torch {peer.torch}, and {here.name} has torch {here.torch}" if here else None

    def _turn_away(self, peer: _Peer, why: str) -> None:
        """Go on without a node that cannot take part; it hears why and, if too few are left, so do all others."""
        outcome = Outcome("FAILED", 1, f"{peer.name} was turned away: {why}")
        peer.channel.send("welcome", host=socket.gethostname())
        peer.channel.send("outcome", **asdict(outcome))
        peer.channel.close()
        self._gone[peer.node] = (peer.name, why)
        if self._are_too_few and not self._round:
            self.finish(outcome)
        else:
            self._tell_loss(peer, why)

    def _lose(self, peer: _Peer) -> None:
        del self._peers[peer.node]
        peer.channel.close()
        if self._is_over:
            return
        why = peer.why or peer.channel.lost or ""
        self._gone[peer.node] = (peer.name, why)
        self._tell_loss(peer, why)
        if self._round and peer.node in self._round.nodes and not peer.is_fine:
            self._round.has_lost = True
            self._stores.tell_of_loss()
            self._end_ranks()

    def _tell_loss(self, peer: _Peer, why: str) -> None:
        self._tell(self._peers, "lost", node=peer.node, host=peer.host, why=why, goes_on=not self._are_too_few)

    # --- what they say ---

    def _take(self, peer: _Peer, message: Message) -> None:
        peer.behind = min(peer.behind, time.time() - message["sent"])
        match message["kind"]:
            case "ready":
                peer.is_ready = True
            case "failed":
                peer.failure = message
                self._stores.tell_of_loss()
                self._end_ranks()
            case "over":
                peer.report = message
            case "leaving":
                peer.why = message["why"]
            case "stop" if not self._is_over:
                self._is_over = True
                others = [node for node in self._peers if node != peer.node]
                self._tell(others, "stop", signal=message["signal"], by=f"{peer.name}: {message['by']}")

    def _tell(self, nodes: Collection[int], kind: str, /, **fields: Any) -> None:
        for node in nodes:
            self._peers[node].channel.send(kind, **fields)

    # --- before a generation ---

    def _begin_gathering(self) -> None:
        self._round = None
        self._deadline = time.monotonic() + JOIN_SECONDS
        self._missing: list[int] = []  # as all were told
        self._tells_missing_at = time.monotonic() + contract.MISSING_SECONDS
        self._enough_since: float | None = None

    def _gather(self) -> None:
        """Begin a generation when all places are taken, or enough of them and nobody else is to be expected."""
        self._note_who_cannot_come()
        self._tell_who_is_missing()
        ready = sorted(node for node, peer in self._peers.items() if peer.is_ready)
        places = filled(self._places, ready)
        nodes = [node for node in places if node in ready]
        now, enough = time.monotonic(), len(nodes) >= self._node.min_nodes
        if self._are_too_few:
            self.finish(self._too_few())
        elif enough and (self._is_settled(places, ready) or now > self._deadline or self._is_last_call_over(ready)):
            self._places = places
            self._begin(nodes)
        elif now > self._deadline:
            self.finish(self._absent(ready))

    def _note_who_cannot_come(self) -> None:
        for node, (host, why) in self._not_started().items():
            if node not in self._peers:
                self._gone.setdefault(node, (name_of(node, host), why))

    def _tell_who_is_missing(self) -> None:
        """Tell all who are here which nodes they wait for, if that has changed for some seconds."""
        missing = [node for node in range(self._node.nnodes) if node not in self._peers and node not in self._gone]
        if missing != self._missing and time.monotonic() >= self._tells_missing_at:
            self._missing, self._tells_missing_at = missing, time.monotonic() + contract.MISSING_SECONDS
            self._tell(self._peers, "missing", nodes=missing)

    def _is_settled(self, places: list[int], ready: list[int]) -> bool:
        """Tell whether nobody is to be expected any more for whom there is a place."""
        expected = {*range(self._node.nnodes)}.difference(ready, self._gone)
        return not expected or ({*places} <= {*ready} and expected.isdisjoint(self._places))

    @property
    def _are_too_few(self) -> bool:
        return self._node.nnodes - len(self._gone) < self._node.min_nodes

    def _is_last_call_over(self, ready: list[int]) -> bool:
        self._enough_since = self._enough_since or time.monotonic()
        patience = 0.0 if self._number else LAST_CALL_SECONDS
        return len(ready) == len(self._peers) and time.monotonic() >= self._enough_since + patience

    def _begin(self, nodes: list[int]) -> None:
        peers = [self._peers[node] for node in nodes]
        addresses = [peer.channel.here or self._own_address() for peer in peers]
        port = self._stores.open(addresses[0] if len({*addresses}) == 1 else None)
        self._round = _Round(nodes)
        layout = [(peer.node, peer.host, peer.ranks) for peer in peers]
        for peer, address in zip(peers, addresses, strict=True):
            peer.is_ready, peer.failure, peer.report = False, None, None
            peer.channel.send("generation", number=self._number, address=address, port=port, nodes=layout)
        self._number += 1

    def _own_address(self) -> str:
        """Return our address as others know it: one's own name may mean the loopback on one's own machine."""
        known = (peer.channel.here for peer in self._peers.values() if peer.channel.here)
        return next(known, self._node.master_addr)

    # --- in a generation ---

    def _end_ranks(self) -> None:
        if self._round and not self._round.is_ending:
            self._round.is_ending = True
            self._tell(self._members(), "end-ranks")

    def _members(self) -> list[int]:
        """Return the nodes of this generation that are not lost."""
        return [node for node in self._round.nodes if node in self._peers] if self._round else []

    def _judge(self) -> None:
        """When all ranks of all nodes have ended, decide what follows."""
        assert self._round
        here = [self._peers[node] for node in self._members()]
        has_room = len(self._round.nodes) < self._node.places
        if has_room and any(peer.is_ready for node, peer in self._peers.items() if node not in self._round.nodes):
            self._end_ranks()
        if any(peer.report is None for peer in here):
            return
        failures = [(peer.failure["at"] + peer.behind, peer) for peer in here if peer.failure]
        if self._round.has_lost:
            self._go_on()
        elif failures:
            self._blame(min(failures, key=lambda failure: failure[0])[1])
        elif any(peer.report and peer.report["cut"] for peer in here):
            self._go_on()
        else:
            self.finish(self._well(here))

    def _blame(self, peer: _Peer) -> None:
        assert peer.failure
        rank, code = peer.failure["rank"], peer.failure["code"]
        if self._failures >= self._node.max_restarts:
            self.finish(failed(rank, code, peer.host))
            return
        self._failures += 1
        self._again(rank=rank, counted=True)

    def _go_on(self) -> None:
        """Go on with the nodes there are; that some were lost or have come is no failure of the ranks."""
        if self._are_too_few:
            self.finish(self._too_few())
        else:
            self._again(rank=None, counted=False)

    def _again(self, rank: int | None, *, counted: bool) -> None:
        self._tell(self._members(), "again", restart=self._number, rank=rank, counted=counted)
        self._begin_gathering()

    def _well(self, here: list[_Peer]) -> Outcome:
        if any(peer.report and peer.report["continue"] for peer in here):
            return PREEMPTED
        return succeeded(self._node, sum(peer.ranks for peer in here), self._stores.was_used)

    def _too_few(self) -> Outcome:
        left, least = self._node.nnodes - len(self._gone), self._node.min_nodes
        lost = "; ".join(f"{name} was lost: {why}" for name, why in self._gone.values())
        reason = f"{lost} ({left} of {self._node.nnodes} nodes left, {least} needed)"
        return Outcome("FAILED", 1, reason, lost=tuple(name for name, _ in self._gone.values()))

    def _absent(self, ready: list[int]) -> Outcome:
        absent = [str(node) for node in range(self._node.nnodes) if node not in ready]
        who = f"node {absent[0]}" if len(absent) == 1 else f"nodes {', '.join(absent)}"
        return Outcome("FAILED", 1, f"{who} did not come within {JOIN_SECONDS:g} s")


def name_of(node: int, host: str) -> str:
    """Name a node for people."""
    return f"node {node} ({host})"
