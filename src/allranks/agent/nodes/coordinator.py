"""The coordinator in node 0's agent: all agents connect to it, and it decides for all nodes.

A generation of ranks starts when the nodes have connected. It ends on all nodes together: when a rank fails, a node is
lost, a missing node arrives, or all ranks have exited. When every node has ended its ranks, the coordinator starts
another generation or ends the attempt. So all nodes count restarts alike and name the same first failure.

torch's dynamic rendezvous is not used: it takes a node for dead when clocks differ by more than the keep-alive (seen:
both nodes then continue alone, each with its own world), checks once a second, counts restarts on each node separately
and numbers nodes by sorting their names as text.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
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

#: Limit for missing nodes to connect: importing torch can take minutes when many nodes do it at once.
JOIN_SECONDS = 600.0
#: How much longer to wait for the rest once enough nodes are ready.
LAST_CALL_SECONDS = 5.0
#: Limit for a connection to authenticate, which an agent does as soon as the coordinator has greeted.
_PROOF_SECONDS = 30.0
#: Most unauthenticated connections: a new one replaces the oldest. An agent connects again.
_MOST_UNAUTHENTICATED = 1024
#: Most connections to accept before messages are read again.
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
    report: Message | None = None  # its "over" message, once no rank is left
    #: Estimated clock offset in seconds: the least difference between our time of reading and its time of sending.
    behind: float = math.inf

    @property
    def name(self) -> str:
        return name_of(self.node, self.host)


class Coordinator:
    """Reads the messages of all agents, which connect to ``listener``, and decides for them without blocking."""

    def __init__(self, node: NodeSpec, key: bytes, listener: socket.socket, stores: Stores, torch: str | None) -> None:
        self._node = node
        self._key = key
        self._listener = listener
        self._stores = stores
        self._torch = torch  # the part of its version that all nodes must share; None if this node has no torch
        self._unauthenticated: dict[Channel, float] = {}  # since when, oldest first
        self._refused = 0
        self._peers: dict[int, _Peer] = {}
        self._gone: dict[int, tuple[str, str]] = {}  # node -> its name, and why it was lost
        self._places: list[int] = [*range(node.places)]  # the nodes that take part, in the order of their ranks
        self._number = 0
        self._failures = 0
        self._is_over = False
        self._outcome: Outcome | None = None
        self._start_gathering()
        listener.setblocking(False)

    @property
    def descriptors(self) -> list[Any]:
        """Descriptors to poll: if one is readable, call :meth:`tick`."""
        return [self._listener, *self._unauthenticated, *(peer.channel for peer in self._peers.values())]

    @property
    def is_alone(self) -> bool:
        """Whether no other agent is connected."""
        return all(peer.node == self._node.node for peer in self._peers.values())

    def connect(self) -> socket.socket:
        """Return a connection for this node's own agent, which is treated like any other."""
        ours, theirs = socket.socketpair()
        self._greet(ours)
        return theirs

    def tick(self) -> None:
        """Accept connections, handle messages, and start or end a generation when due."""
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
        """Send the outcome of the attempt to all agents, unless the attempt is over already."""
        if not self._is_over:
            self._is_over, self._outcome = True, outcome
            self._send(self._peers, "outcome", **outcome._asdict())

    def close(self) -> None:
        """Close all connections, and log how many were refused."""
        for connection in self.descriptors:
            connection.close()
        if self._refused > 1:
            complain(f"note: {self._refused} connections that did not know the run's key were closed")

    # --- connections ---

    def _accept(self) -> None:
        """Accept connections; admit authenticated agents of this run, and close all others."""
        with suppress(OSError):  # No further connection waits, or it is closed already.
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
        """Close a connection; count it only if it sent data, since port monitors send none."""
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
        # Ranks with another torch could hang, or worse. A node without torch needs none, or its agent reports that.
        if self._torch and (hello["torch"] or self._torch) != self._torch:
            own = name_of(self._node.node, socket.gethostname())
            self._reject(peer, f"it has torch {hello['torch']}, and {own} has torch {self._torch}")
            return
        self._peers[peer.node] = peer
        self._gone.pop(peer.node, None)
        if self._outcome:  # A spare may connect after the end of a very short job, which has not failed.
            channel.send("outcome", **self._outcome._asdict())
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
        """Continue without a node that cannot take part; if too few are left, fail with that reason."""
        outcome = Outcome("FAILED", 1, f"{peer.name} was rejected: {why}")
        peer.channel.send("outcome", **outcome._asdict())
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
        if peer.node in self._nodes and (not peer.report or peer.failure or peer.report["cut"]):  # Else done.
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
                quiet = message["quiet"]  # With its time converted to this node's clock.
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
        self._nodes: list[int] = []  # of the current generation
        self._has_lost = False  # a node of this generation
        self._judge = HangJudge(self._node)
        self._ended_for_hang = False
        self._is_ending = False
        self._deadline = time.monotonic() + JOIN_SECONDS
        self._missing: list[int] = []  # as last reported to all agents
        self._reports_missing_at = time.monotonic() + contract.MISSING_SECONDS  # if that has changed by then
        self._enough_since: float | None = None

    def _gather(self) -> None:
        """Start a generation when all nodes are ready, or enough of them and no other node is expected."""
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
        # Our own name may resolve to the loopback here: use the address at which the other nodes reach us.
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
        """When all ranks of all nodes have exited, decide what follows."""
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
            # A node that was lost or has arrived does not count as a failure of the ranks.
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
        """Report the start or end of a hang to all nodes; end the ranks if the policy says so."""
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
        """The outcome if too few nodes are left to continue; else None."""
        left, least = self._node.nnodes - len(self._gone), self._node.min_nodes
        if left >= least:
            return None
        lost = "; ".join(f"{name} was lost: {why}" for name, why in self._gone.values())
        reason = f"{lost} ({left} of {self._node.nnodes} nodes left, {least} needed)"
        return Outcome("FAILED", 1, reason, lost=tuple(name for name, _ in self._gone.values()))


def name_of(node: int, host: str) -> str:
    """Return a node's name for messages."""
    return f"node {node} ({host})"


def filled(places: Sequence[int], ready: Collection[int]) -> list[int]:
    """Replace nodes that are not ready by spares that are; return the nodes in the order of their ranks.

    A lost node that no spare replaces keeps its place.
    """
    spares = iter(sorted(set(ready) - set(places)))
    return [node if node in ready else next(spares, node) for node in places]


def not_started(node: NodeSpec) -> dict[int, tuple[str, str]]:
    """Return the nodes whose agents the launcher has failed to start so far: number -> (name, reason).

    Empty if the job needs all nodes: then the launcher starts all of them or none.
    """
    path = Path(node.run_dir, contract.node_dir(node.attempt, 0), contract.NOT_STARTED)
    with suppress(OSError):
        reports = () if node.needs_all else read_lines(path)
        return {each["node"]: (name_of(each["node"], each["host"]), each["why"]) for each in reports}
    return {}
