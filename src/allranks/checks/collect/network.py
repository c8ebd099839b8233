"""The network between nodes: names, interfaces, whether all reach the first one and each other, how far clocks differ.

The first node listens at the port where all are to meet, all others connect to it. Nodes start at different moments, so
each has patience; when the last one has come, all end together.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from allranks.checks.collect.gather import ProbeRequest
from allranks.checks.collect.peers import Peer, PeerError, accept, connect, serve, stop
from allranks.system import processes
from allranks.system.processes import command_of, text_of
from allranks.system.routes import interface_to, listen_everywhere, listen_for, local_address

T = TypeVar("T")

#: The resolver of the C library waits for 5 s, and then asks again.
_REVERSE_SECONDS = 3.0
_INTERFACES = Path("/sys/class/net")
#: Seconds that the first node waits for the next one, and another node for the first to listen.
PATIENCE = 10.0
#: Seconds that the first node waits for all of them.
_ALTOGETHER = 20.0
_PAUSE = 0.05
#: All must be there at the same time to connect to each other, and more are not reached over SSH at once.
_MOST_NODES = 64
_CLOCK, _BYE, _MESH = "clock", "bye", "mesh"
_CLOCK_ROUNDS = 5


# --- names and interfaces ---


def names(request: ProbeRequest) -> dict[str, Any]:
    """Resolve the machine's own name and that of the first node, and measure how long reverse lookup takes."""
    own = _resolve(socket.gethostname())
    if not request.master_addr:
        return {"own": own, "master": None, "reverse": None}
    master = _resolve(request.master_addr)
    return {"own": own, "master": master, "reverse": _reverse(own if request.node == 0 else master)}


def interface(request: ProbeRequest) -> dict[str, Any] | None:
    """Return the interface that carries the route to the first node, and all there are; None for a single node."""
    if not request.master_addr:
        return None
    name, why = interface_to(request.master_addr, Path("/proc"))
    cards = {folder.name: _card(folder) for folder in sorted(_INTERFACES.iterdir()) if folder.is_dir()}
    address = None
    with contextlib.suppress(OSError):  # There is no route to it.
        address = local_address(request.master_addr)
    return {"route": name, "why": why, "address": address, "all": cards}


def _resolve(name: str) -> dict[str, Any]:
    """Return the addresses of a name, or why it has none."""
    found: dict[str, Any] = {"name": name, "addresses": [], "loopback": [], "error": None}
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        found["addresses"] = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
        found["loopback"] = [
            each for each in found["addresses"] if ipaddress.ip_address(each.partition("%")[0]).is_loopback
        ]
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found


def _reverse(resolved: dict[str, Any]) -> dict[str, Any] | None:
    """Measure how many seconds it takes to find the name of an address; None for more than the time limit."""
    outside = [each for each in resolved["addresses"] if each not in resolved["loopback"]]
    if not outside:
        return None
    began = time.monotonic()

    def ask() -> None:
        with contextlib.suppress(OSError):  # It has no name: how long that answer takes is what counts.
            socket.getnameinfo((outside[0], 0), 0)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_REVERSE_SECONDS)
    return {"address": outside[0], "seconds": None if asking.is_alive() else round(time.monotonic() - began, 4)}


def _card(folder: Path) -> dict[str, Any]:
    """Return what the kernel reports of an interface: MTU in bytes, speed in Mbit/s where it has one, and its state."""
    speed, mtu = text_of(folder / "speed"), text_of(folder / "mtu")
    return {
        "mtu": int(mtu) if mtu.isdecimal() else None,
        "speed": int(speed) if speed.isdecimal() and int(speed) else None,  # -1 where it is unknown.
        "state": text_of(folder / "operstate"),
    }


# --- the port of the first node, and who reaches whom ---


def _once(function: Callable[[ProbeRequest], T]) -> Callable[[ProbeRequest], T]:
    """Memoize a function for each request; concurrent callers wait for the first one's result."""
    lock, done = threading.Lock(), dict[str, T]()

    def call(request: ProbeRequest) -> T:
        with lock:
            if request.word not in done:
                done[request.word] = function(request)
            return done[request.word]

    return call


@_once
def opened(request: ProbeRequest) -> tuple[socket.socket | None, str | None]:
    """Return a socket that listens at the port of a request, or why there is none."""
    try:
        return listen_for(request.master_addr, request.master_port), None
    except OSError as error:
        return None, os.strerror(error.errno) if error.errno else str(error)


def port(request: ProbeRequest) -> dict[str, Any] | None:
    """Return the port, why it cannot be listened at and who holds it; None on other nodes than the first."""
    if request.nnodes == 1 or not request.master_port or request.node:
        return None
    _, error = opened(request)
    return {"port": request.master_port, "error": error, "holder": _holder(request.master_port) if error else None}


def _holder(port: int) -> dict[str, Any] | None:
    """Return user, process and command of who has a port; process and command only where the kernel shows them."""
    for name in ("tcp", "tcp6"):
        for line in text_of(Path("/proc/net", name)).splitlines()[1:]:  # man 5 proc
            fields = line.split()
            user, inode = int(fields[7]), fields[9]
            if int(fields[1].rpartition(":")[2], 16) == port and inode != "0":
                pid = next((pid for pid in processes.process_ids() if _has(pid, inode)), None)
                command = " ".join(command_of(pid))[:120] if pid else None
                return {"user": user, "pid": pid, "command": command or None}
    return None


def _has(pid: int, inode: str) -> bool:
    try:
        return any(str(file.readlink()) == f"socket:[{inode}]" for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False  # It has exited, or is another user's.


def reach(request: ProbeRequest) -> dict[str, Any] | None:
    """Return whether this node reaches the first one, or on the first one who has come; None if no nodes meet."""
    return _met(request)[0]


def mesh(request: ProbeRequest) -> dict[str, Any] | None:
    """Return which of the nodes that have met this one cannot connect to; None if it has not met them."""
    return _met(request)[1]


@_once
def _met(request: ProbeRequest) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    if request.nnodes == 1 or not request.master_port or not request.master_addr:
        return None, None
    mesh_port = _MeshPort(request.word) if "mesh" in request.wanted and request.nnodes <= _MOST_NODES else None
    try:
        return _wait_on_first(request, mesh_port) if request.node == 0 else _join_first(request, mesh_port)
    finally:
        if mesh_port:
            stop(mesh_port.listener)


def _window(began: float) -> dict[str, float]:
    """Return when something was tried, by the clock of this node."""
    return {"began": round(began, 3), "ended": round(time.time(), 3)}


# --- the first node ---


def _wait_on_first(request: ProbeRequest, mesh_port: _MeshPort | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    began, (listener, why) = time.time(), opened(request)
    if listener is None:
        return {"error": {"kind": "port", "text": why}, "came": [], **_window(began)}, None
    meeting = _Meeting(request, mesh_port.port if mesh_port else 0)
    serve(listener, meeting.accept)
    meeting.wait_for_all()
    stop(listener)
    reached = {"error": None, "came": sorted(meeting.came), **_window(began)}
    return reached, meeting.try_all(mesh_port) if mesh_port else None


class _Meeting:
    """The meeting of all nodes at the first one, whose port for the mesh is ``mesh_port``; 0: none is tried."""

    def __init__(self, request: ProbeRequest, mesh_port: int) -> None:
        self._request, self._mesh_port = request, mesh_port
        self._changed, self._last = threading.Condition(), time.monotonic()
        self._is_closed = False
        self._done: set[int] = set()
        #: Address, and port for the mesh (0: none), of each node that has come.
        self.came: dict[int, tuple[str, int]] = {}

    def accept(self, connection: socket.socket) -> None:
        """Serve a node that has connected."""
        met = accept(connection, self._request.word)
        if met is None:
            return
        peer, node = met
        mesh_port = 0
        with contextlib.suppress(OSError):  # It has come, even if it is gone since.
            while (line := peer.read()) == _CLOCK:
                peer.send(repr(time.time()))
            if line.startswith(_MESH):
                mesh_port = int(line.split()[1])
        with self._changed:
            self.came[node] = (peer.address, mesh_port)
            self._last = time.monotonic()
            self._changed.notify_all()
        if mesh_port:
            self._join(node, peer)
        peer.close()

    def wait_for_all(self) -> None:
        """Wait until all have come, or no other one is to be expected."""
        until = time.monotonic() + _ALTOGETHER
        with self._changed:
            while len(self.came) < self._request.nnodes - 1:
                left = min(self._last + PATIENCE, until) - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._is_closed = True
            self._changed.notify_all()

    def _join(self, node: int, peer: Peer) -> None:
        """Send a node the ports of the others, and wait until it has tried to connect to them, and until all have."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed)
            ports = {str(other): place for other, place in self._in_mesh().items() if other != node}
        with contextlib.suppress(OSError):  # It is gone: the others need not wait for it.
            # Address and port of each; no address: that of the first node as seen from there.
            peer.send(json.dumps({**ports, "0": ("", self._mesh_port)}))
            peer.read(_ALTOGETHER)
        self._finish(node)

    def try_all(self, mesh_port: _MeshPort) -> dict[str, Any]:
        """Connect to all others too, and wait until all have."""
        found = mesh_port.try_all(self._in_mesh(), 0)
        self._finish(0)
        return found

    def _finish(self, node: int) -> None:
        with self._changed:
            self._done.add(node)
            self._changed.notify_all()
            # Until all have tried to connect to all, those included that come while this waits.
            self._changed.wait_for(lambda: self._done >= {0, *self._in_mesh()}, _ALTOGETHER)

    def _in_mesh(self) -> dict[int, tuple[str, int]]:
        """Return address and port of the nodes that have come and have a port for the mesh."""
        return {node: place for node, place in self.came.items() if place[1]}


# --- the others ---


def _join_first(request: ProbeRequest, mesh_port: _MeshPort | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    began = time.time()
    try:
        peer = _connect_to_first(request)
        clock = _compare_clocks(peer)
        peer.send(f"{_MESH} {mesh_port.port}" if mesh_port else _BYE)
    except (PeerError, OSError, ValueError) as error:
        why = {"kind": getattr(error, "kind", "other"), "text": str(error)}
        return {"error": why, **_window(began)}, None
    reached = {"error": None, "address": peer.address, "clock": clock, **_window(began)}
    found = None
    if mesh_port:
        # The connection may break, or bring something else: then it is unknown.
        with contextlib.suppress(OSError, ValueError):
            ports = json.loads(peer.read(_ALTOGETHER + PATIENCE))
            addresses = {int(other): (address or peer.address, port) for other, (address, port) in ports.items()}
            tried = mesh_port.try_all(addresses, request.node)
            peer.send(_BYE)
            peer.read(_ALTOGETHER)  # The others may not have tried ours yet: the first node closes when all have.
            found = tried
    peer.close()
    return reached, found


def _connect_to_first(request: ProbeRequest) -> Peer:
    """Connect to the first node; it may not listen yet."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return connect(request.master_addr, request.master_port, request.word, request.node)
        except PeerError as error:
            if error.kind not in ("refused", "closed") or time.monotonic() + _PAUSE > until:
                raise
        time.sleep(_PAUSE)


def _compare_clocks(peer: Peer) -> dict[str, float]:
    """Return how many seconds the first node's clock is ahead of ours, and how well that is known."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        sent, started = time.time(), time.monotonic()
        peer.send(_CLOCK)
        theirs = float(peer.read())
        took = time.monotonic() - started
        rounds.append((took, theirs - (sent + took / 2)))
    took, ahead = min(rounds)
    return {"ahead": round(ahead, 6), "within": round(took / 2, 6)}


class _MeshPort:
    """A port that the kernel chose, as those of collectives, where other nodes connect to this one."""

    def __init__(self, word: str) -> None:
        self._word, self.listener = word, listen_everywhere(0)
        self.port: int = self.listener.getsockname()[1]
        serve(self.listener, self._accept)

    def _accept(self, connection: socket.socket) -> None:
        if met := accept(connection, self._word):
            met[0].close()

    def try_all(self, others: Mapping[int, tuple[str, int]], node: int) -> dict[str, Any]:
        """Connect to address and port of others; return how many were tried, and which were not reached and why."""
        from concurrent.futures import ThreadPoolExecutor

        def why_not(other: tuple[str, int]) -> str | None:
            try:
                connect(*other, self._word, node).close()
            except PeerError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(min(_MOST_NODES, len(others)) or 1) as pool:
            found = dict(zip(map(str, others), pool.map(why_not, others.values()), strict=True))
        return {"tried": len(others), "unreached": {other: why for other, why in found.items() if why}}
