"""The coordinator: a part of node 0's agent that all agents connect to, and that decides for all.

A generation of ranks starts when the nodes are there, and ends on all nodes together: when a rank fails, when a node
is lost, when one that was missing comes, or when all ranks have ended. What follows is decided when every node has
ended its ranks: another generation, or the end. So all nodes count restarts alike and name the same first failure.

torch's dynamic rendezvous is not used for this: it takes a node for dead when clocks differ by more than the
keep-alive (seen: both nodes then continue alone, each in a world of its own), checks once a second, counts restarts
on each node by itself and numbers nodes by the text of their names.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.agent.hangs import HangJudge, Quiet
from allranks.agent.heartbeat import complain
from allranks.agent.nodes.channel import Channel, Message
from allranks.agent.workers.group import PREEMPTED, Outcome, failed, succeeded
from allranks.contract import NodeSpec

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
    torch: str | None  # its version
    is_ready: bool = False  # for the next generation
    failure: Message | None = None  # the first of its ranks
    quiet: Quiet | None = None  # its ranks have not advanced for too long
    report: Message | None = None  # when all its ranks had ended
    #: The least seconds from its time of sending to our time of reading: how its clock differs from ours.
    behind: float = math.inf
    why: str | None = None  # its reason to leave

    @property
    def name(self) -> str:
        return name_of(self.node, self.host)

    @property
    def is_fine(self) -> bool:
        """Whether its ranks have all ended by themselves, and well."""
        return self.report is not None and self.failure is None and not self.report["cut"]


class Coordinator:
    """Reads the messages of all agents, which connect to ``listener``, and decides for them. It never blocks."""

    def __init__(self, node: NodeSpec, key: bytes, listener: socket.socket, stores: Stores) -> None:
        self._node = node
        self._key = key
        self._listener = listener
        self._stores = stores
        self._unauthenticated: dict[Channel, float] = {}  # since when, in that order
        self._refused = 0
        self._peers: dict[int, _Peer] = {}
        self._gone: dict[int, tuple[str, str]] = {}  # node -> its name, and why it was lost
        self._places: list[int] = [*range(node.places)]  # the nodes that have them, in the order of their ranks
        self._number = 0
        self._failures = 0
        self._awaits_own = False
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
        self._awaits_own = True  # Before all others: if versions of torch differ, another node is refused, not this.
        self._unauthenticated[self._channel(ours)] = time.monotonic()
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
        for channel in (*self._unauthenticated, *(peer.channel for peer in self._peers.values())):
            channel.close()
        if self._refused > 1:
            complain(f"note: {self._refused} connections that did not know the run's key were closed")
        self._listener.close()

    # --- connections ---

    def _accept(self) -> None:
        """Accept connections; admit those that have proven to be agents of this run, and close what is none."""
        try:
            for _ in range(0 if self._awaits_own else _MOST_AT_ONCE):
                channel = self._channel(self._listener.accept()[0])
                if len(self._unauthenticated) >= _MOST_UNAUTHENTICATED:
                    self._refuse(next(iter(self._unauthenticated)), "it did not identify itself")
                self._unauthenticated[channel] = time.monotonic()
        except OSError:
            pass  # There is no other connection, or it is closed already.
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

    def _channel(self, connection: socket.socket) -> Channel:
        return Channel(connection, self._key, is_coordinator=True, patient=self._node.needs_all)

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
        peer = _Peer(channel, hello["node"], hello["host"], hello["ranks"], hello["torch"])
        if why := self._other_torch(peer):
            self._reject(peer, why)
            return
        self._peers[peer.node] = peer
        self._awaits_own = self._awaits_own and peer.node != self._node.node
        self._gone.pop(peer.node, None)
        channel.send("welcome", host=socket.gethostname())
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
            return f"the agent there expects {self._node.nnodes} nodes"
        return None

    def _other_torch(self, peer: _Peer) -> str | None:
        """Return how a node's version of torch differs from that of the others: ranks could hang, or worse.

        A node without torch is not turned away: either the ranks need none, or its agent reports what is missing.
        """
        for here in self._peers.values():
            if here.torch and peer.torch and here.torch != peer.torch:
                return f"it has torch {peer.torch}, and {here.name} has torch {here.torch}"
        return None

    def _reject(self, peer: _Peer, why: str) -> None:
        """Continue without a node that cannot take part; if too few are left, all fail for that reason."""
        outcome = Outcome("FAILED", 1, f"{peer.name} was rejected: {why}")
        peer.channel.send("welcome", host=socket.gethostname())
        peer.channel.send("outcome", **asdict(outcome))
        peer.channel.close()
        self._gone[peer.node] = (peer.name, why)
        if self._are_too_few and not self._nodes:
            self.finish(outcome)
        else:
            self._report_loss(peer, why)

    def _lose(self, peer: _Peer) -> None:
        del self._peers[peer.node]
        peer.channel.close()
        if self._is_over:
            return
        why = peer.why or peer.channel.lost or ""
        self._gone[peer.node] = (peer.name, why)
        self._report_loss(peer, why)
        if peer.node in self._nodes and not peer.is_fine:
            self._has_lost = True
            self._stores.report_loss()
            self._end_ranks()

    def _report_loss(self, peer: _Peer, why: str) -> None:
        self._send(self._peers, "lost", node=peer.node, host=peer.host, why=why, goes_on=not self._are_too_few)

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
                peer.why = message["why"]
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
        self._reports_missing_at = time.monotonic() + contract.MISSING_SECONDS
        self._enough_since: float | None = None

    def _gather(self) -> None:
        """Start a generation when all places are taken, or enough of them and no other node is to be expected."""
        for node, (host, why) in not_started(self._node).items():
            if node not in self._peers:
                self._gone.setdefault(node, (name_of(node, host), why))
        self._report_missing()
        ready = sorted(node for node, peer in self._peers.items() if peer.is_ready)
        places = filled(self._places, ready)
        nodes = [node for node in places if node in ready]
        is_late = time.monotonic() > self._deadline
        if self._are_too_few:
            self.finish(self._too_few())
        elif len(nodes) >= self._node.min_nodes:
            if self._is_settled(places, ready) or is_late or self._is_last_call_over(ready):
                self._places = places
                self._start_generation(nodes)
        elif is_late:
            absent = [str(node) for node in range(self._node.nnodes) if node not in ready]
            who = f"node {absent[0]}" if len(absent) == 1 else f"nodes {', '.join(absent)}"
            self.finish(Outcome("FAILED", 1, f"{who} did not come within {JOIN_SECONDS:g} s"))

    def _report_missing(self) -> None:
        """Report to all agents which nodes they wait for, if that has changed for some seconds."""
        missing = [node for node in range(self._node.nnodes) if node not in self._peers and node not in self._gone]
        if missing != self._missing and time.monotonic() >= self._reports_missing_at:
            self._missing, self._reports_missing_at = missing, time.monotonic() + contract.MISSING_SECONDS
            self._send(self._peers, "missing", nodes=missing)

    def _is_settled(self, places: list[int], ready: list[int]) -> bool:
        """Return whether no node is to be expected any more for which there is a place."""
        expected = {*range(self._node.nnodes)}.difference(ready, self._gone)
        return not expected or ({*places} <= {*ready} and expected.isdisjoint(self._places))

    @property
    def _are_too_few(self) -> bool:
        return self._node.nnodes - len(self._gone) < self._node.min_nodes

    def _is_last_call_over(self, ready: list[int]) -> bool:
        self._enough_since = self._enough_since or time.monotonic()
        patience = 0.0 if self._number else LAST_CALL_SECONDS
        return len(ready) == len(self._peers) and time.monotonic() >= self._enough_since + patience

    def _start_generation(self, nodes: list[int]) -> None:
        peers = [self._peers[node] for node in nodes]
        # Our own name may mean the loopback on this machine: the others know the address at which they reach us.
        known = (peer.channel.here for peer in self._peers.values() if peer.channel.here)
        own = next(known, self._node.master_addr)
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
        self._check_hang(here)
        reports = [peer.report for peer in here if peer.report]
        if len(reports) < len(here):
            return
        if self._is_over:
            return
        failures = [(peer.failure["at"] + peer.behind, peer) for peer in here if peer.failure]
        is_cut = not failures and not self._ended_for_hang and any(report["cut"] for report in reports)
        if self._has_lost or is_cut:
            # That nodes were lost or have come is no failure of the ranks.
            if self._are_too_few:
                self.finish(self._too_few())
            else:
                self._restart(rank=None, counted=False)
        elif self._ended_for_hang:
            self._failures += 1
            self._restart(rank=None, counted=True)
        elif failures:
            self._blame(min(failures, key=lambda failure: failure[0])[1])
        elif any(report["continue"] for report in reports):
            self.finish(PREEMPTED)
        else:
            self.finish(succeeded(self._node, sum(peer.ranks for peer in here), self._stores.was_used))

    def _check_hang(self, here: list[_Peer]) -> None:
        """Report a hang of this generation to all nodes, or that it is over; end the ranks, if that is to follow."""
        if self._is_ending:
            return
        nodes = [peer for peer in here for _ in range(peer.ranks)]
        left = [rank for rank, peer in enumerate(nodes) if peer.report]
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

    def _blame(self, peer: _Peer) -> None:
        assert peer.failure
        rank = peer.failure["rank"]
        if self._failures >= self._node.max_restarts:
            self.finish(failed(rank, peer.failure["code"], peer.host))
        else:
            self._failures += 1
            self._restart(rank=rank, counted=True)

    def _restart(self, rank: int | None, *, counted: bool) -> None:
        self._send(self._members(), "again", restart=self._number, rank=rank, counted=counted)
        self._start_gathering()

    def _too_few(self) -> Outcome:
        left, least = self._node.nnodes - len(self._gone), self._node.min_nodes
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
    """Return the nodes whose agents the launcher could not start: their hosts, and why.

    Where all are needed it starts none without the others; then nothing is read.
    """
    if node.needs_all:
        return {}
    path = Path(node.run_dir, contract.node_dir(node.attempt, 0), contract.NOT_STARTED)
    try:
        reports = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {report["node"]: (report["host"], report["why"]) for report in reports}
    except (OSError, ValueError):
        return {}  # All have been started, as far as is known yet, or the file is being written.
