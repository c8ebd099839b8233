"""The coordinator: a part of node 0's agent that all agents connect to, and that decides for all.

A generation of ranks starts when the nodes are there, and ends on all nodes together: when a rank fails, when a node
is lost, when one that was missing comes, or when all ranks have ended. What follows is decided when every node has
ended its ranks: another generation, or the end. So all nodes count restarts alike and name the same first failure.

torch's dynamic rendezvous is not used for this: it takes a node for dead when clocks differ by more than the
keep-alive (seen: both nodes then continue alone, each in a world of its own), checks once a second, counts restarts
on each node by itself and numbers nodes by the text of their names.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.agent.hangs import HangJudge, Quiet
from allranks.agent.heartbeat import complain
from allranks.agent.nodes.channel import Channel, Message
from allranks.agent.workers.group import PREEMPTED, Outcome, failed, succeeded
from allranks.record.events import read_lines
from allranks.record.spec import NodeSpec

if TYPE_CHECKING:
    from allranks.agent.stores import Stores

#: How long missing nodes are waited for; importing torch can take minutes where many nodes do it at once.
JOIN_SECONDS = 600.0
#: How much longer all nodes are waited for when there are enough of them.
LAST_CALL_SECONDS = 5.0
#: How long a connection may prove nothing: an agent does so as soon as the coordinator has greeted it.
_PROOF_SECONDS = 30.0
#: The most connections that have proven nothing: the oldest is closed for the newest. An agent connects again.
_MOST_UNAUTHENTICATED = 1024
#: Connections that are accepted before messages are read again.
_MOST_AT_ONCE = 64


@dataclass
class _Peer:
    """A node's agent."""

    channel: Channel
    node: int
    host: str
    ranks: int
    is_ready: bool = False  # for the next generation
    failure: Message | None = None  # the first of its ranks
    quiet: Quiet | None = None  # its ranks have not advanced for too long
    report: Message | None = None  # when all its ranks had ended
    #: The least seconds from its time of sending to our time of reading: how its clock differs from ours.
    behind: float = math.inf

    @property
    def name(self) -> str:
        return name_of(self.node, self.host)


class Coordinator:
    """Reads the messages of all agents, which connect to ``listener``, and decides for them. It never blocks."""

    def __init__(self, node: NodeSpec, key: bytes, listener: socket.socket, stores: Stores, torch: str | None) -> None:
        self._node = node
        self._key = key
        self._listener = listener
        self._stores = stores
        self._torch = torch  # what must be the same on all nodes of its version; None if this node has none
        self._unauthenticated: dict[Channel, float] = {}  # since when, in that order
        self._refused = 0
        self._peers: dict[int, _Peer] = {}
        self._gone: dict[int, tuple[str, str]] = {}  # node -> its name, and why it was lost
        self._places: list[int] = [*range(node.places)]  # the nodes that have them, in the order of their ranks
        self._number = 0
        self._failures = 0
        self._is_over = False
        self._outcome: Outcome | None = None
        self._start_gathering()
        listener.setblocking(False)

    @property
    def descriptors(self) -> list[Any]:
        """What to poll: when one of them can be read, there is something to do."""
        return [self._listener, *self._unauthenticated, *(peer.channel for peer in self._peers.values())]

    @property
    def is_alone(self) -> bool:
        """Whether no other agent is connected any more."""
        return all(peer.node == self._node.node for peer in self._peers.values())

    def connect(self) -> socket.socket:
        """Return a connection for this node's own agent, which is treated as all others are."""
        ours, theirs = socket.socketpair()
        self._greet(ours)
        return theirs

    def tick(self) -> None:
        """Do what there is to do."""
        self._accept()
        for peer in list(self._peers.values()):
            for message in peer.channel.receive():
                self._handle(peer, message)
            peer.channel.flush()
            if peer.channel.lost:
                self._lose(peer)
        if not self._is_over:
            self._stores.tick()
            self._check_generation() if self._nodes else self._gather()

    def finish(self, outcome: Outcome) -> None:
        """Send all agents the outcome of the attempt, unless that is known."""
        if not self._is_over:
            self._is_over, self._outcome = True, outcome
            self._send(self._peers, "outcome", **asdict(outcome))

    def close(self) -> None:
        """Close all connections, and report how many were refused."""
        for connection in self.descriptors:
            connection.close()
        if self._refused > 1:
            complain(f"note: {self._refused} connections that did not know the run's key were closed")

    # --- connections ---

    def _accept(self) -> None:
        """Accept connections; admit those that have proven to be agents of this run, and close what is none."""
        with suppress(OSError):  # There is no other connection, or it is closed already.
            for _ in range(_MOST_AT_ONCE):
                self._greet(self._listener.accept()[0])
        now = time.monotonic()
        for channel, since in [*self._unauthenticated.items()]:
            messages = channel.receive()
            if messages:
                del self._unauthenticated[channel]
                self._admit(channel, *messages)
            elif channel.lost:
                self._refuse(channel, channel.lost)
            elif now - since > _PROOF_SECONDS:
                self._refuse(channel, f"it did not identify itself within {_PROOF_SECONDS:g} s")

    def _greet(self, connection: socket.socket) -> None:
        channel = Channel(connection, self._key, is_coordinator=True, patient=self._node.needs_all)
        if len(self._unauthenticated) >= _MOST_UNAUTHENTICATED:
            self._refuse(next(iter(self._unauthenticated)), "it did not identify itself")
        self._unauthenticated[channel] = time.monotonic()

    def _refuse(self, channel: Channel, why: str) -> None:
        """Close a connection, and count it if it has sent something: monitors only test whether a port is open."""
        del self._unauthenticated[channel]
        self._refused += channel.has_heard
        if channel.has_heard and self._refused == 1:
            complain(f"note: closed a connection from {channel.there or 'this node'}: {why}; others are only counted")
        channel.close()

    def _admit(self, channel: Channel, hello: Message, *more: Message) -> None:
        if why := self._refusal(hello):
            channel.send("refused", why=why)
            channel.close()
            return
        peer = _Peer(channel, hello["node"], hello["host"], hello["ranks"])
        channel.send("welcome", host=socket.gethostname())
        # Ranks with another torch could hang, or worse. Without torch either they need none, or their agent reports it.
        if self._torch and (hello["torch"] or self._torch) != self._torch:
            own = name_of(self._node.node, socket.gethostname())
            self._reject(peer, f"it has torch {hello['torch']}, and {own} has torch {self._torch}")
            return
        self._peers[peer.node] = peer
        self._gone.pop(peer.node, None)
        if self._outcome:  # A spare may be late for a job of a second, which has not failed for that.
            channel.send("outcome", **asdict(self._outcome))
        for message in more:
            self._handle(peer, message)

    def _refusal(self, hello: Message) -> str | None:
        if hello["kind"] != "hello":
            return "it did not send a hello"
        if hello["attempt"] != self._node.attempt:
            return f"the agent there belongs to attempt {self._node.attempt}, and this one to {hello['attempt']}"
        if self._is_over and not self._outcome:
            return "the job is being stopped"
        if peer := self._peers.get(hello["node"]):
            return f"{peer.name} is there already"
        if hello["node"] >= self._node.nnodes:
            return f"the agent there expects {self._node.nnodes} node{'s' if self._node.nnodes > 1 else ''}"
        return None

    def _reject(self, peer: _Peer, why: str) -> None:
        """Continue without a node that cannot take part; if too few are left, all fail for that reason."""
        outcome = Outcome("FAILED", 1, f"{peer.name} was rejected: {why}")
        peer.channel.send("outcome", **asdict(outcome))
        peer.channel.close()
        self._gone[peer.node] = (peer.name, why)
        if self._too_few and not self._nodes:
            self.finish(outcome)
        else:
            self._report_loss(peer, why)

    def _lose(self, peer: _Peer) -> None:
        del self._peers[peer.node]
        peer.channel.close()
        if self._is_over:
            return
        why = peer.channel.lost or ""
        self._gone[peer.node] = (peer.name, why)
        self._report_loss(peer, why)
        if peer.node in self._nodes and (not peer.report or peer.failure or peer.report["cut"]):  # Else it was done.
            self._has_lost = True
            self._stores.report_loss()
            self._end_ranks()

    def _report_loss(self, peer: _Peer, why: str) -> None:
        self._send(self._peers, "lost", node=peer.node, host=peer.host, why=why, goes_on=not self._too_few)

    # --- messages ---

    def _handle(self, peer: _Peer, message: Message) -> None:
        peer.behind = min(peer.behind, time.time() - message["sent"])
        match message["kind"]:
            case "ready":
                peer.is_ready = True
            case "failed":
                peer.failure = message
                self._stores.report_loss()
                self._end_ranks()
            case "quiet":
                quiet = message["quiet"]  # Its time becomes one of this node's clock.
                peer.quiet = quiet and {**quiet, "since": quiet["since"] + peer.behind}
            case "over":
                peer.report = message
            case "leaving":
                peer.channel.lost = message["why"]
            case "stop" if not self._is_over:
                self._is_over = True
                others = [node for node in self._peers if node != peer.node]
                self._send(others, "stop", signal=message["signal"], by=f"{peer.name}: {message['by']}")

    def _send(self, nodes: Collection[int], kind: str, /, **fields: Any) -> None:
        for node in nodes:
            self._peers[node].channel.send(kind, **fields)

    # --- before a generation ---

    def _start_gathering(self) -> None:
        self._nodes: list[int] = []  # of the generation that runs
        self._has_lost = False  # one of them
        self._judge = HangJudge(self._node)
        self._ended_for_hang = False
        self._is_ending = False
        self._deadline = time.monotonic() + JOIN_SECONDS
        self._missing: list[int] = []  # as all agents know it
        self._reports_missing_at = time.monotonic() + contract.MISSING_SECONDS  # if that has changed by then
        self._enough_since: float | None = None

    def _gather(self) -> None:
        """Start a generation when all places are taken, or enough of them and no other node is to be expected."""
        for node, known in not_started(self._node).items():
            if node not in self._peers:
                self._gone.setdefault(node, known)
        missing = [node for node in range(self._node.nnodes) if node not in self._peers and node not in self._gone]
        if missing != self._missing and time.monotonic() >= self._reports_missing_at:
            self._missing, self._reports_missing_at = missing, time.monotonic() + contract.MISSING_SECONDS
            self._send(self._peers, "missing", nodes=missing)
        ready = sorted(node for node, peer in self._peers.items() if peer.is_ready)
        places = filled(self._places, ready)
        nodes = [node for node in places if node in ready]
        now = time.monotonic()
        is_late = now > self._deadline
        if outcome := self._too_few:
            self.finish(outcome)
        elif len(nodes) >= self._node.min_nodes:
            expected = {*range(self._node.nnodes)}.difference(ready, self._gone)
            is_settled = not expected or (nodes == places and expected.isdisjoint(self._places))
            self._enough_since = self._enough_since or now
            last_call = self._enough_since + (0.0 if self._number else LAST_CALL_SECONDS)
            if is_settled or is_late or (len(ready) == len(self._peers) and now >= last_call):
                self._places = places
                self._start_generation(nodes)
        elif is_late:
            absent = [str(node) for node in range(self._node.nnodes) if node not in ready]
            who = f"node {absent[0]}" if len(absent) == 1 else f"nodes {', '.join(absent)}"
            self.finish(Outcome("FAILED", 1, f"{who} did not come within {JOIN_SECONDS:g} s"))

    def _start_generation(self, nodes: list[int]) -> None:
        peers = [self._peers[node] for node in nodes]
        # Our own name may mean the loopback on this machine: the others know the address at which they reach us.
        own = next(filter(None, (peer.channel.here for peer in self._peers.values())), self._node.master_addr)
        addresses = [peer.channel.here or own for peer in peers]
        port = self._stores.open(addresses[0] if len({*addresses}) == 1 else None)
        self._nodes = nodes
        layout = [(peer.node, peer.host, peer.ranks) for peer in peers]
        for peer, address in zip(peers, addresses, strict=True):
            peer.is_ready, peer.failure, peer.report, peer.quiet = False, None, None, None
            peer.channel.send("generation", number=self._number, address=address, port=port, nodes=layout)
        self._number += 1

    # --- in a generation ---

    def _end_ranks(self) -> None:
        if not self._is_ending:
            self._is_ending = bool(self._nodes)
            self._send(self._members(), "end-ranks")

    def _members(self) -> list[int]:
        """Return the nodes of this generation that are not lost."""
        return [node for node in self._nodes if node in self._peers]

    def _check_generation(self) -> None:
        """When all ranks of all nodes have ended, decide what follows."""
        here = [self._peers[node] for node in self._members()]
        has_room = len(self._nodes) < self._node.places
        if has_room and any(peer.is_ready for node, peer in self._peers.items() if node not in self._nodes):
            self._end_ranks()
        if not self._is_ending:
            self._check_hang(here)
        reports = [peer.report for peer in here if peer.report]
        if len(reports) < len(here) or self._is_over:
            return
        failures = [(peer.failure["at"] + peer.behind, peer.failure, peer.host) for peer in here if peer.failure]
        is_cut = any(report["cut"] for report in reports) and not (failures or self._ended_for_hang)
        if self._has_lost or is_cut:
            # A node that was lost or has come is not a failure of the ranks.
            if outcome := self._too_few:
                self.finish(outcome)
            else:
                self._restart(None, counted=False)
        elif self._ended_for_hang:
            self._restart(None, counted=True)
        elif failures:
            _, failure, host = min(failures, key=lambda failed: failed[0])
            if self._failures >= self._node.max_restarts:
                self.finish(failed(failure["rank"], failure["code"], host))
            else:
                self._restart(failure["rank"], counted=True)
        elif any(report["continue"] for report in reports):
            self.finish(PREEMPTED)
        else:
            self.finish(succeeded(self._node, sum(peer.ranks for peer in here), self._stores.was_used))

    def _check_hang(self, here: list[_Peer]) -> None:
        """Report a hang of this generation to all nodes, or that it is over; end the ranks, if that is to follow."""
        peer_of_rank = [peer for peer in here for _ in range(peer.ranks)]
        left = [rank for rank, peer in enumerate(peer_of_rank) if peer.report]
        if found := self._judge.judge([peer.quiet for peer in here if not peer.report], left):
            kind, fields = found
            self._send(self._members(), kind, **fields)
        if self._judge.hang is None or self._judge.action == "report":
            return
        if self._judge.action == "end" or self._failures >= self._node.max_restarts:
            self.finish(Outcome("FAILED", 1, self._judge.why))
        else:
            self._ended_for_hang = True
            self._end_ranks()

    def _restart(self, rank: int | None, *, counted: bool) -> None:
        self._failures += counted
        self._send(self._members(), "again", restart=self._number, rank=rank, counted=counted)
        self._start_gathering()

    @property
    def _too_few(self) -> Outcome | None:
        """How the attempt ends if so many nodes are lost that it cannot continue; else None."""
        left, least = self._node.nnodes - len(self._gone), self._node.min_nodes
        if left >= least:
            return None
        lost = "; ".join(f"{name} was lost: {why}" for name, why in self._gone.values())
        reason = f"{lost} ({left} of {self._node.nnodes} nodes left, {least} needed)"
        return Outcome("FAILED", 1, reason, lost=tuple(name for name, _ in self._gone.values()))


def name_of(node: int, host: str) -> str:
    """Return a node's name for people."""
    return f"node {node} ({host})"


def filled(places: Sequence[int], ready: Collection[int]) -> list[int]:
    """Return the node for each place: the one that has it now or, if that is not ready, a spare one that is.

    A place whose node is lost, and that no spare takes, keeps the number of that node.
    """
    spares = iter(sorted(set(ready) - set(places)))
    return [node if node in ready else next(spares, node) for node in places]


def not_started(node: NodeSpec) -> dict[int, tuple[str, str]]:
    """Return the nodes whose agents the launcher could not start, as far as is known yet: their names, and why.

    Where all are needed it starts none without the others; then nothing is read.
    """
    path = Path(node.run_dir, contract.node_dir(node.attempt, 0), contract.NOT_STARTED)
    with suppress(OSError):
        reports = () if node.needs_all else read_lines(path)
        return {each["node"]: (name_of(each["node"], each["host"]), each["why"]) for each in reports}
    return {}
