"""A node's end of the meeting: it says what becomes of the node's ranks, and hears what all nodes are to do."""

from __future__ import annotations

import errno
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from allranks import contract
from allranks.agent.channel import Channel
from allranks.agent.hub import JOIN_SECONDS, Hub, name_of
from allranks.agent.messages import Message
from allranks.agent.outcome import Outcome
from allranks.agent.ranks import RankExit
from allranks.agent.stop import Stop
from allranks.agent.torch_import import version_to_match
from allranks.contract import NodeSpec
from allranks.errors import LaunchError
from allranks.runs.events import EventWriter

#: How long node 0's agent is dialled that does not answer: nodes of one job may start minutes apart.
DIAL_SECONDS = 300.0
_TRY_SECONDS = 2.0
#: The same of one that has another key: it may be another run's, whose end frees the port.
_OTHER_KEY_SECONDS = contract.scaled_wait(30.0)
_OTHER_KEY = "the agent there has another key, or has ended"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5

Wait = Callable[[float], object]


@dataclass(frozen=True)
class Meeting:
    """The nodes of a generation, as (number, host, ranks) in the order of their ranks, and where the ranks meet."""

    number: int
    nodes: tuple[tuple[int, str, int], ...]
    address: str
    port: int

    @property
    def world_size(self) -> int:
        """How many ranks there are on all nodes."""
        return sum(ranks for _, _, ranks in self.nodes)

    def __contains__(self, node: int) -> bool:
        """Tell whether a node takes part."""
        return any(number == node for number, _, _ in self.nodes)

    def place(self, node: int) -> tuple[int, int]:
        """Return a node's place among the nodes, and its first rank."""
        place = next(place for place, (number, _, _) in enumerate(self.nodes) if number == node)
        return place, sum(ranks for _, _, ranks in self.nodes[:place])


@dataclass(frozen=True)
class Again:
    """The ranks are to be started anew: as which generation, for which rank's failure, and whether that counts."""

    restart: int
    rank: int | None
    counted: bool


class Member:
    """This node among the nodes.

    Args:
        node: the node's orders.
        key: of the run.
        stop: told when the run is to stop on all nodes.
        events: told of nodes that were lost.
        hub: of node 0's agent.

    Attributes:
        meeting: the newest generation, from when it is to begin until it is over.
        shall_end: whether the ranks are to be ended.
        goes_on_without: whether a node of this generation is lost, and another one can begin all the same.
        again: what is to follow, when all nodes have ended their ranks.
        outcome: how the attempt has ended, once it has.
    """

    def __init__(self, node: NodeSpec, key: bytes, stop: Stop, events: EventWriter, hub: Hub | None) -> None:
        self.meeting: Meeting | None = None
        self.shall_end = self.goes_on_without = False
        self.again: Again | None = None
        self.outcome: Outcome | None = None
        self._node = node
        self._key = key
        self._stop = stop
        self._events = events
        self._hub = hub
        self._channel: Channel | None = None
        self._master: str | None = None
        self._has_taken_part = False
        self._misses_master_at = math.inf

    @property
    def is_spare(self) -> bool:
        """Whether it has only waited so far for another node to be lost: the others can do without it."""
        return self._node.node >= self._node.places and not self._has_taken_part

    @property
    def descriptors(self) -> list[Any]:
        """What to select on: when one of them can be read, there is something to do."""
        own = [self._channel] if self._channel and not self._channel.lost else []
        return own + (self._hub.descriptors if self._hub else [])

    def tick(self) -> bool:
        """Do what there is to do; tell whether something was heard.

        Raises:
            LaunchError: node 0's agent wants nothing of this one.
        """
        if self._hub:
            self._hub.tick()
        if self._channel is None or self._channel.lost:
            return False
        self._channel.flush()
        messages = self._channel.receive()
        for message in messages:
            self._hear(message)
        if self._channel.lost and self._master and not (self.outcome or self._stop.signal):
            why = f"{self._master} was lost: {self._channel.lost} (no other node can take its place)"
            self.outcome = Outcome("FAILED", 1, why, lost=(self._master,))
        return bool(messages) or self._channel.lost is not None

    # --- what this node says ---

    def join(self, wait: Wait) -> None:
        """Connect to node 0's agent; ``wait`` waits so many seconds, and calls :meth:`tick` meanwhile.

        Raises:
            LaunchError: it cannot be reached.
        """
        pause, began = _FIRST_PAUSE, time.monotonic()
        self._misses_master_at = began + contract.MISSING_SECONDS
        while not self._master:
            problem = self._dial() or self._introduce(wait)
            patience = _OTHER_KEY_SECONDS if problem == _OTHER_KEY else DIAL_SECONDS
            if problem and time.monotonic() - began > patience:
                raise self._unreachable(problem, patience)
            if problem:
                self._wait_for_master(wait, pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def ready(self) -> None:
        """Say that this node can begin a generation."""
        self.meeting = self.again = None
        self.shall_end = self.goes_on_without = False
        self._say("ready")
        if self.is_spare:
            self._events.write(contract.WAITING)

    def failed(self, rank: int, ended: RankExit) -> None:
        """Say that a rank has failed, the first of this node."""
        self._say("failed", rank=rank, code=ended.code, at=ended.time)

    def over(self, *, cut: bool, wants_to_continue: bool) -> None:
        """Say that no rank of this node is left; ``cut`` if some were ended, not by themselves."""
        self._say("over", cut=cut, **{"continue": wants_to_continue})

    def ask_to_stop(self, number: signal.Signals, by: str) -> None:
        """Say that all nodes are to stop."""
        self._say("stop", signal=number, by=by)

    def leave(self, wait: Wait, patience: float, why: str | None) -> None:
        """Leave; node 0 leaves last, but waits no longer than ``patience`` seconds for the others.

        Args:
            wait: as in :meth:`join`.
            patience: of node 0, in seconds.
            why: what keeps this node from going on, if something does.
        """
        if self._hub:
            if why:
                self._hub.finish(Outcome("FAILED", 1, f"{self._name}: {why}"))
            deadline = time.monotonic() + patience
            while not self._hub.is_alone and not self._stop.hurry and time.monotonic() < deadline:
                wait(_LONGEST_PAUSE)
            self._hub.close()
            self._hub = None
        elif why:
            self._say("leaving", why=why)
        if self._channel:
            self._channel.close()

    @property
    def _name(self) -> str:
        return name_of(self._node.node, socket.gethostname())

    def _say(self, kind: str, **fields: Any) -> None:
        if self._channel and not self._channel.lost:
            self._channel.send(kind, **fields)

    # --- how it comes to node 0 ---

    def _dial(self) -> str | None:
        """Connect; return why that failed if it did."""
        if self._hub:
            self._channel = self._channel_over(self._hub.connect())
            return None
        try:
            connection = socket.create_connection((self._node.master_addr, self._node.master_port or 0), _TRY_SECONDS)
        except socket.gaierror as error:
            return f"{self._node.master_addr} cannot be resolved: {error.strerror}"
        except TimeoutError:
            return "timed out: nothing answers there"
        except OSError as error:
            return os.strerror(error.errno).lower() if error.errno else str(error)
        if connection.getsockname() == connection.getpeername():  # TCP can connect a port of its own to itself.
            connection.close()
            return os.strerror(errno.ECONNREFUSED).lower()
        self._channel = self._channel_over(connection)
        return None

    def _channel_over(self, connection: socket.socket) -> Channel:
        return Channel(connection, self._key, is_hub=False, patient=self._node.needs_all)

    def _introduce(self, wait: Wait) -> str | None:
        """Say who this node is, and wait to be welcome; return why that failed if it did."""
        assert self._channel
        node = self._node
        self._channel.send(
            "hello",
            attempt=node.attempt,
            node=node.node,
            host=socket.gethostname(),
            ranks=node.nproc_per_node,
            torch=version_to_match(),
        )
        deadline = time.monotonic() + JOIN_SECONDS
        while not self._master and not self._channel.lost and time.monotonic() < deadline:
            self._wait_for_master(wait, _LONGEST_PAUSE)
        if self._master:
            return None
        problem = self._channel.lost or f"who listens there says nothing for {JOIN_SECONDS:g} s"
        self._channel.close()
        return _OTHER_KEY if self._channel.is_greeted else problem

    def _wait_for_master(self, wait: Wait, seconds: float) -> None:
        """Wait for node 0's agent, and tell once that this node does."""
        wait(seconds)
        if not self._master and time.monotonic() >= self._misses_master_at:
            self._misses_master_at = math.inf
            self._events.write(contract.MISSING, nodes=[0], of=self._node.nnodes, at=self._where)

    @property
    def _where(self) -> str:
        return f"{self._node.master_addr}:{self._node.master_port}"

    def _unreachable(self, problem: str, patience: float) -> LaunchError:
        return LaunchError(
            f"{self._name} cannot reach node 0 at {self._where} for {patience:g} s",
            why=problem,
            fix="another run may have that port; nodes that are started by hand need the same job name, --master-addr, "
            "--master-port and key: ~/.config/allranks/key, or the file that ALLRANKS_KEY_FILE names"
            if problem == _OTHER_KEY
            else "see what the agent of node 0 says, in its run's folder (slurm-*.out, or "
            f"{contract.node_dir(self._node.attempt, 0)}/{contract.AGENT_LOG}); that name must mean its host on this "
            "node, and no firewall may close the port between the nodes",
        )

    # --- what it hears ---

    def _hear(self, message: Message) -> None:
        fields = {name: value for name, value in message.items() if name not in ("kind", "sent")}
        match message["kind"]:
            case "welcome":
                self._master = name_of(0, fields["host"])
            case "generation":
                nodes = tuple((node, host, ranks) for node, host, ranks in fields["nodes"])
                self.meeting = Meeting(fields["number"], nodes, fields["address"], fields["port"])
                self._has_taken_part = True
            case "end-ranks":
                self.shall_end = True
            case "again":
                self.again = Again(**fields)
            case "lost":
                self._events.write(contract.NODE_LOST, **fields)
                if self.meeting and fields["node"] in self.meeting:
                    self.goes_on_without = fields["goes_on"]
            case "missing":
                self._events.write(contract.MISSING, **fields, of=self._node.nnodes)
            case "stop":
                self._stop.request(signal.Signals(fields["signal"]), fields["by"])
            case "outcome":
                self.outcome = Outcome(**{**fields, "lost": tuple(fields["lost"])})
            case "refused":
                raise self._refused(fields["why"])

    def _refused(self, why: str) -> LaunchError:
        return LaunchError(
            f"{self._name} was turned away by the agent at {self._where}",
            why=why,
            fix="--master-addr and --master-port must be the same on all nodes of a job, and no other's",
        )
