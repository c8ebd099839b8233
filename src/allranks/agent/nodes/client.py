"""Runs the ranks of one of several nodes, together with those of the others.

The :class:`Coordinator` in node 0's agent decides when all nodes start, end and restart their ranks. Each node's client
reports the state of its ranks and receives the decisions.
"""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.agent.hangs import Quiet
from allranks.agent.nodes.channel import Channel, Message
from allranks.agent.nodes.coordinator import JOIN_SECONDS, Coordinator, name_of
from allranks.agent.stop import StopRequest, StopRequestedError
from allranks.agent.stores import Stores
from allranks.agent.workers.fork_server import ForkClient, RankExit
from allranks.agent.workers.group import Generation, Outcome, WorkerGroup
from allranks.errors import LaunchError
from allranks.record.events import EventWriter
from allranks.record.files import read_key
from allranks.record.spec import NodeSpec

#: Limit for connecting to node 0's agent: nodes of one job may start minutes apart.
DIAL_SECONDS = 300.0
_TRY_SECONDS = 2.0
#: The same if that has another key: it may belong to a run that is about to free the port.
_OTHER_KEY_SECONDS = contract.scaled_wait(30.0)
_OTHER_KEY = "the agent there has another key, or has ended"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
#: The line of torch/version.py.
_TORCH_VERSION = re.compile(r"^__version__\b[^=\n]*=\s*'([^']+)'", re.MULTILINE)

_POLL_SECONDS = 0.05
#: Grace period for ranks when a node is lost and the others continue: without its ranks they cannot save a checkpoint.
_WITHOUT_A_NODE_SECONDS = contract.scaled_wait(5.0)
#: How long node 0 waits for the others at the end of the attempt, beyond the grace period of their ranks.
_LEAVE_SECONDS = 10.0

Wait = Callable[[float], object]


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
    known = read_key(Path(node.run_dir, contract.KEY_FILE))
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


class CoordinatorClient:
    """The coordinator's client on each node. On node 0 it also drives the ``coordinator``."""

    def __init__(
        self, node: NodeSpec, key: bytes, stop: StopRequest, events: EventWriter, coordinator: Coordinator | None
    ) -> None:
        self.generation: Generation | None = None  # The current one; None while nodes gather.
        self.shall_end = False  # Whether the coordinator wants the ranks ended.
        self.continues_without = False  # Whether a node was lost and the job continues without it.
        self.again: Message | None = None  # The restart to do; set once all nodes have ended their ranks.
        self.outcome: Outcome | None = None  # Of the attempt; None before its end.
        self._node = node
        self._name = name_of(node.node, socket.gethostname())
        self._where = f"{node.master_addr}:{node.master_port}"
        self._key = key
        self._stop = stop
        self._events = events
        self._coordinator = coordinator
        self._channel: Channel | None = None
        self._master: str | None = None
        self._quiet: Quiet | None = None  # as the coordinator knows it
        self._members: list[int] = []  # the nodes of the newest generation
        self._misses_master_at = math.inf

    @property
    def is_spare(self) -> bool:
        """Whether this node is a spare that has not replaced a node yet."""
        return self._node.node >= self._node.places and not self._members

    @property
    def descriptors(self) -> list[Any]:
        """Descriptors to poll: if one is readable, call :meth:`tick`."""
        own = [self._channel] if self._channel and not self._channel.lost else []
        return own + (self._coordinator.descriptors if self._coordinator else [])

    def tick(self) -> bool:
        """Exchange messages; return whether any came; raise a LaunchError if node 0 refuses this node."""
        if self._coordinator:
            self._coordinator.tick()
        if self._channel is None or self._channel.lost:
            return False
        self._channel.flush()
        messages = self._channel.receive()
        for message in messages:
            self._handle(message)
        if self._channel.lost and self._master and not (self.outcome or self._stop.signal):
            why = f"{self._master} was lost: {self._channel.lost} (no other node can take its place)"
            self.outcome = Outcome("FAILED", 1, why, lost=(self._master,))
        return bool(messages) or self._channel.lost is not None

    # --- what this node sends ---

    def join(self, wait: Wait) -> None:
        """Connect to node 0's agent; ``wait`` waits for its argument in seconds, and calls :meth:`tick` meanwhile.

        Raises:
            LaunchError: node 0 cannot be reached.
        """
        pause, began = _FIRST_PAUSE, time.monotonic()
        self._misses_master_at = began + contract.MISSING_SECONDS
        while not self._master:
            problem = self._connect() or self._introduce(wait)
            if problem is None:
                return
            patience = _OTHER_KEY_SECONDS if problem == _OTHER_KEY else DIAL_SECONDS
            if time.monotonic() - began > patience:
                raise self._unreachable(problem, patience)
            self._wait_for_master(wait, pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def ready(self) -> None:
        """Report that this node can start a generation."""
        self.generation = self.again = None
        self.shall_end = self.continues_without = False
        self._quiet = None
        self._send("ready")
        if self.is_spare:
            self._events.write(contract.WAITING)

    def failed(self, rank: int, ended: RankExit) -> None:
        """Report the first rank of this node that has failed."""
        self._send("failed", rank=rank, code=ended.code, at=ended.time)

    def report_quiet(self, quiet: Quiet | None) -> None:
        """Report that no rank of this node has advanced for too long or, with None, that one has; send only changes."""
        if quiet is not self._quiet:
            self._quiet = quiet
            self._send("quiet", quiet=quiet)

    def over(self, *, cut: bool, wants_to_continue: bool) -> None:
        """Report that no rank of this node is left; ``cut``: whether the agent ended some of them."""
        self._send("over", cut=cut, **{"continue": wants_to_continue})

    def request_stop(self, number: signal.Signals, by: str) -> None:
        """Request that all nodes stop."""
        self._send("stop", signal=number, by=by)

    def leave(self, wait: Wait, patience: float, why: str | None) -> None:
        """Disconnect; ``why`` is the reason if this node cannot continue; ``wait`` is as in :meth:`join`.

        Node 0 leaves last, but waits at most ``patience`` seconds for the others.
        """
        if self._coordinator:
            if why:
                self._coordinator.finish(Outcome("FAILED", 1, f"{self._name}: {why}"))
            deadline = time.monotonic() + patience
            while not self._coordinator.is_alone and not self._stop.hurry and time.monotonic() < deadline:
                with suppress(StopRequestedError):  # The nodes are leaving already.
                    wait(_LONGEST_PAUSE)
            self._coordinator.close()
            self._coordinator = None
        elif why:
            self._send("leaving", why=why)
        if self._channel:
            self._channel.close()

    def _send(self, kind: str, **fields: Any) -> None:
        if self._channel and not self._channel.lost:
            self._channel.send(kind, **fields)

    # --- connecting to node 0 ---

    def _connect(self) -> str | None:
        """Connect; return the error, or None."""
        try:
            connection = self._coordinator.connect() if self._coordinator else self._dial()
        except socket.gaierror as error:
            return f"{self._node.master_addr} cannot be resolved: {error.strerror}"
        except TimeoutError:
            return "timed out: nothing answers there"
        except OSError as error:
            return os.strerror(error.errno).lower() if error.errno else str(error)
        self._channel = Channel(connection, self._key, is_coordinator=False, patient=self._node.needs_all)
        return None

    def _dial(self) -> socket.socket:
        connection = socket.create_connection((self._node.master_addr, self._node.master_port or 0), _TRY_SECONDS)
        if connection.getsockname() == connection.getpeername():  # TCP can connect a local port to itself.
            connection.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, "")
        return connection

    def _introduce(self, wait: Wait) -> str | None:
        """Send this node's identity and wait for the welcome; return the error, or None."""
        assert self._channel
        node = self._node
        self._channel.send(
            "hello",
            attempt=node.attempt,
            node=node.node,
            host=socket.gethostname(),
            ranks=node.nproc_per_node,
            torch=torch_to_match(),
        )
        deadline = time.monotonic() + JOIN_SECONDS
        while not self._master and not self._channel.lost and time.monotonic() < deadline:
            self._wait_for_master(wait, _LONGEST_PAUSE)
        if self._master:
            return None
        problem = self._channel.lost or f"no answer within {JOIN_SECONDS:g} s"
        self._channel.close()
        return _OTHER_KEY if self._channel.is_greeted else problem

    def _wait_for_master(self, wait: Wait, seconds: float) -> None:
        """Wait for node 0's agent; if it is missing for long, record that once."""
        wait(seconds)
        if not self._master and time.monotonic() >= self._misses_master_at:
            self._misses_master_at = math.inf
            self._events.write(contract.MISSING, nodes=[0], of=self._node.nnodes, at=self._where)

    def _unreachable(self, problem: str, patience: float) -> LaunchError:
        log = f"{contract.node_dir(self._node.attempt, 0)}/{contract.AGENT_LOG}"
        fix = (
            f"see what the agent of node 0 says, in its run's directory (the log of its job, or {log}); that name must "
            "mean its host on this node, and no firewall may close the port between the nodes"
        )
        if problem == _OTHER_KEY:
            fix = (
                "another run may have that port; nodes that are started by hand need the same job name, --master-addr, "
                "--master-port and key: ~/.config/allranks/key, or the file that ALLRANKS_KEY_FILE names"
            )
        what = f"{self._name} cannot reach node 0 at {self._where} for {patience:g} s"
        return LaunchError(what, why=problem, fix=fix)

    # --- messages of the coordinator ---

    def _handle(self, message: Message) -> None:
        fields = {name: value for name, value in message.items() if name not in ("kind", "sent")}
        match message["kind"]:
            case "welcome":
                self._master = name_of(0, fields["host"])
            case "generation":
                nodes = fields["nodes"]
                self._members = [number for number, _, _ in nodes]
                place = self._members.index(self._node.node)
                counts = [ranks for _, _, ranks in nodes]
                self.generation = Generation(
                    restart=fields["number"],
                    node_rank=place,
                    nodes=len(nodes),
                    world_size=sum(counts),
                    first_rank=sum(counts[:place]),
                    master_addr=fields["address"],
                    master_port=fields["port"],
                )
            case "end-ranks":
                self.shall_end = True
            case "again":
                self.again = message
            case "lost":
                self._events.write(contract.NODE_LOST, **fields)
                if self.generation and fields["node"] in self._members:
                    self.continues_without = fields["goes_on"]
            case contract.HANG | contract.HANG_OVER:
                self._events.write(message["kind"], **fields)
            case "missing":
                self._events.write(contract.MISSING, **fields, of=self._node.nnodes)
            case "stop":
                self._stop.request(signal.Signals(fields["signal"]), fields["by"])
            case "outcome":
                self.outcome = Outcome(**{**fields, "lost": tuple(fields["lost"])})
            case "refused":
                raise LaunchError(
                    f"{self._name} was rejected by the agent at {self._where}",
                    why=fields["why"],
                    fix="--master-addr and --master-port must be the same on all nodes of a job, and no other's",
                )


def torch_to_match() -> str | None:
    """Return the part of torch's version that all nodes must share, without importing torch; None if there is no torch.

    For nccl it is the complete version: the part after "+" names the CUDA, and so the NCCL, of the build. Over gloo,
    GPU and CPU builds of one version work together.
    """
    if "torch" in sys.modules:
        version = str(sys.modules["torch"].__version__)
    else:
        spec = importlib.util.find_spec("torch")
        path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
        found = _TORCH_VERSION.search(path.read_text()) if path and path.is_file() else None
        if found is None:
            return None
        version = found[1]
    return version.partition("+")[0] if os.environ.get(contract.BACKEND) == "gloo" else version
