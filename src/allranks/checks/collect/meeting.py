"""Whether all nodes reach the first one at the port where they are to meet, each other, and how far clocks differ.

The first node listens there, all others connect to it. Nodes start at different moments, so each has patience; when the
last one has come, all end together. They exchange lines of text, and first prove that they belong to this probe: each
shows a half of the request's word that only they know, and not the same half, so that an echo proves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from allranks.checks.collect.gather import ProbeRequest
from allranks.system import processes
from allranks.system.processes import command_of, text_of
from allranks.system.routes import listen_everywhere, listen_for

T = TypeVar("T")

#: Seconds in which a peer must answer: packets that get no answer are sent again after 1 and 3 s.
ANSWER_SECONDS = 5.0
#: Seconds that the first node waits for the next one, and another node for the first to listen.
PATIENCE = 10.0
#: Seconds that the first node waits for all of them.
_ALTOGETHER = 20.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.2
#: All must be there at the same time to connect to each other, and more are not reached over SSH at once.
_MOST_NODES = 64
_CLOCK, _BYE, _MESH = "clock", "bye", "mesh"
_CLOCK_ROUNDS = 5
_LONGEST_LINE = 1 << 20
_STRANGER = "who listens there is none of us:"


def _once(function: Callable[[ProbeRequest], T]) -> Callable[[ProbeRequest], T]:
    """Memoize a function for each request; concurrent callers wait for the first one's result."""
    lock, done = threading.Lock(), dict[str, T]()

    def call(request: ProbeRequest) -> T:
        with lock:
            if request.word not in done:
                done[request.word] = function(request)
            return done[request.word]

    return call


# --- facts ---


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
    door = _Door(request.word) if "mesh" in request.wanted and request.nnodes <= _MOST_NODES else None
    try:
        return _host(request, door) if request.node == 0 else _visit(request, door)
    finally:
        if door:
            stop(door.listener)


def _window(began: float) -> dict[str, float]:
    """Return when something was tried, by the clock of this node."""
    return {"began": round(began, 3), "ended": round(time.time(), 3)}


# --- the first node ---


def _host(request: ProbeRequest, door: _Door | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    began, (listener, why) = time.time(), opened(request)
    if listener is None:
        return {"error": {"kind": "port", "text": why}, "came": [], **_window(began)}, None
    hall = _Hall(request, door)
    serve(listener, hall.receive)
    hall.wait_for_all()
    stop(listener)
    reached = {"error": None, "came": sorted(hall.came), **_window(began)}
    return reached, hall.try_all(door) if door else None


class _Hall:
    """Where the nodes come together; ``door`` is that of the first node, where all shall connect to all."""

    def __init__(self, request: ProbeRequest, door: _Door | None) -> None:
        self._request, self._door_port = request, door.port if door else 0
        self._changed, self._last = threading.Condition(), time.monotonic()
        self._is_closed = False
        self._done: set[int] = set()
        #: Address, and port of the door (0: none), of each node that has come.
        self.came: dict[int, tuple[str, int]] = {}

    def receive(self, connection: socket.socket) -> None:
        """Talk with a node that has connected."""
        met = receive(connection, self._request.word)
        if met is None:
            return
        talk, node = met
        door = 0
        with contextlib.suppress(OSError):  # It has come, even if it is gone since.
            while (line := talk.hear()) == _CLOCK:
                talk.say(repr(time.time()))
            if line.startswith(_MESH):
                door = int(line.split()[1])
        with self._changed:
            self.came[node] = (talk.peer, door)
            self._last = time.monotonic()
            self._changed.notify_all()
        if door:
            self._join(node, talk)
        talk.close()

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

    def _join(self, node: int, talk: Talk) -> None:
        """Send a node the doors of the others, and wait until it has tried to connect to them, and until all have."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed)
            doors = {str(other): door for other, door in self.came.items() if door[1] and other != node}
        with contextlib.suppress(OSError):  # It is gone: the others need not wait for it.
            # Address and port of each; no address: that of the first node as seen from there.
            talk.say(json.dumps({**doors, "0": ("", self._door_port)}))
            talk.hear(_ALTOGETHER)
        self._finish(node)

    def try_all(self, door: _Door) -> dict[str, Any]:
        """Connect to all others too, and wait until all have."""
        found = door.try_all({node: other for node, other in self.came.items() if other[1]}, 0)
        self._finish(0)
        return found

    def _finish(self, node: int) -> None:
        with self._changed:
            self._done.add(node)
            self._changed.notify_all()
            all_nodes = {0} | {other for other, (_, door) in self.came.items() if door}
            self._changed.wait_for(lambda: self._done >= all_nodes, _ALTOGETHER)


# --- the others ---


def _visit(request: ProbeRequest, door: _Door | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    began = time.time()
    try:
        talk = _greet_first(request)
        clock = _compare_clocks(talk)
        talk.say(f"{_MESH} {door.port}" if door else _BYE)
    except (TalkError, OSError, ValueError) as error:
        why = {"kind": getattr(error, "kind", "other"), "text": str(error)}
        return {"error": why, **_window(began)}, None
    reached = {"error": None, "address": talk.peer, "clock": clock, **_window(began)}
    found = None
    if door:
        # The connection may break, or bring something else: then it is unknown.
        with contextlib.suppress(OSError, ValueError):
            doors = json.loads(talk.hear(_ALTOGETHER + PATIENCE))
            addresses = {int(other): (address or talk.peer, port) for other, (address, port) in doors.items()}
            tried = door.try_all(addresses, request.node)
            talk.say(_BYE)
            talk.hear(_ALTOGETHER)  # The others may not have tried our door yet: the first node closes when all have.
            found = tried
    talk.close()
    return reached, found


def _greet_first(request: ProbeRequest) -> Talk:
    """Connect to the first node; it may not listen yet."""
    until, pause = time.monotonic() + PATIENCE, _FIRST_PAUSE
    while True:
        try:
            return greet(request.master_addr, request.master_port, request.word, request.node)
        except TalkError as error:
            if error.kind not in ("refused", "closed") or time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _compare_clocks(talk: Talk) -> dict[str, float]:
    """Return how many seconds the first node's clock is ahead of ours, and how well that is known."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        sent, started = time.time(), time.monotonic()
        talk.say(_CLOCK)
        theirs = float(talk.hear())
        took = time.monotonic() - started
        rounds.append((took, theirs - (sent + took / 2)))
    took, ahead = min(rounds)
    return {"ahead": round(ahead, 6), "within": round(took / 2, 6)}


class _Door:
    """A port that the kernel chose, as those of collectives, where other nodes connect to this one."""

    def __init__(self, word: str) -> None:
        self._word, self.listener = word, listen_everywhere(0)
        self.port: int = self.listener.getsockname()[1]
        serve(self.listener, self._receive)

    def _receive(self, connection: socket.socket) -> None:
        if met := receive(connection, self._word):
            met[0].close()

    def try_all(self, doors: Mapping[int, tuple[str, int]], node: int) -> dict[str, Any]:
        """Connect to the doors of others; return how many were tried, and which could not be reached and why."""
        from concurrent.futures import ThreadPoolExecutor

        def why_not(door: tuple[str, int]) -> str | None:
            try:
                greet(*door, self._word, node).close()
            except TalkError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(min(_MOST_NODES, len(doors)) or 1) as pool:
            found = dict(zip(map(str, doors), pool.map(why_not, doors.values()), strict=True))
        return {"tried": len(doors), "unreached": {other: why for other, why in found.items() if why}}


# --- how two nodes talk ---


class TalkError(Exception):
    """Why two nodes cannot talk, in words and as a ``kind``: refused, dropped, route, name, stranger, closed, other."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Talk:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(ANSWER_SECONDS)
        self._lines = connection.makefile("r", encoding="utf-8", errors="replace", newline="\n")

    def say(self, text: str) -> None:
        """Send a line."""
        self._connection.sendall(f"{text}\n".encode())

    def hear(self, seconds: float | None = None) -> str:
        """Wait for a line, and set another time limit first if one is given; empty: the connection is closed."""
        if seconds is not None:
            self._connection.settimeout(seconds)
        return self._lines.readline(_LONGEST_LINE).strip()

    @property
    def peer(self) -> str:
        """The address of the other end."""
        return str(self._connection.getpeername()[0]).removeprefix("::ffff:")

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self._connection.close()


def greet(address: str, port: int, word: str, node: int) -> Talk:
    """Connect to a node, and have it prove that it belongs to the same probe.

    Raises:
        TalkError: why that failed.
    """
    try:
        connection = socket.create_connection((address, port), ANSWER_SECONDS)
    except OSError as error:
        raise _why(error) from None
    if connection.getsockname() == connection.getpeername():  # TCP can connect a port of its own to itself.
        connection.close()
        raise _why(ConnectionRefusedError(errno.ECONNREFUSED, ""))
    talk, middle = Talk(connection), len(word) // 2
    try:
        talk.say(f"{word[:middle]} {node}")
        heard = talk.hear()
    except TimeoutError:
        talk.close()
        raise TalkError("stranger", f"{_STRANGER} it says nothing for {ANSWER_SECONDS:g} s") from None
    except OSError:
        heard = ""
    if heard != word[middle:]:
        talk.close()
        if not heard:
            raise TalkError("closed", "who listens there ends the connection without a word")
        raise TalkError("stranger", f"{_STRANGER} it says {heard[:40]!r}")
    return talk


def receive(connection: socket.socket, word: str) -> tuple[Talk, int] | None:
    """Let a peer prove that it belongs to this probe, and prove it to the peer; None for a stranger."""
    talk, middle = Talk(connection), len(word) // 2
    with contextlib.suppress(OSError):  # It says nothing, or is gone: a stranger.
        proof, _, node = talk.hear().partition(" ")
        if proof == word[:middle] and node.isdecimal():
            talk.say(word[middle:])
            return talk, int(node)
    talk.close()
    return None


def serve(listener: socket.socket, each: Callable[[socket.socket], None]) -> None:
    """Accept connections in a thread, until :func:`stop`; each is handled in a thread of its own."""

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=each, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def stop(listener: socket.socket) -> None:
    """Accept no more connections: closing alone would not wake a thread that waits for one."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _why(error: OSError) -> TalkError:
    if isinstance(error, socket.gaierror):
        return TalkError("name", f"the name cannot be resolved: {error.strerror}")
    if isinstance(error, ConnectionRefusedError):
        return TalkError("refused", "the connection is refused")
    if isinstance(error, TimeoutError):
        return TalkError("dropped", f"no answer within {ANSWER_SECONDS:g} s")
    kind = "route" if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH) else "other"
    return TalkError(kind, os.strerror(error.errno).lower() if error.errno else str(error))
