"""Whether all nodes reach the first one at the port where they are to meet, and how far their clocks differ from its.

The first node listens there, all others come to it. Nodes begin at different moments, so each has patience; when the
last one has come, all end at once.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from allranks.probe.mesh import MOST_NODES, Door
from allranks.probe.once import once
from allranks.probe.order import Order
from allranks.probe.port import opened
from allranks.probe.talk import Talk, TalkError, greet, receive, serve, stop

#: How long the first node waits for the next one, and another node for the first to listen.
PATIENCE = 10.0
#: How long the first node waits for all of them.
_ALTOGETHER = 20.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.2
_CLOCK, _BYE, _MESH = "clock", "bye", "mesh"
_TIMES = 5


def reach(order: Order) -> dict[str, Any] | None:
    """Return whether this node reaches the first one, or on the first one who has come; None where nobody meets."""
    found: dict[str, Any] | None = _met(order)["reach"]
    return found


def mesh(order: Order) -> dict[str, Any] | None:
    """Return which of the nodes that have met this one cannot connect to; None where it has not met them."""
    found: dict[str, Any] | None = _met(order)["mesh"]
    return found


@once
def _met(order: Order) -> dict[str, Any]:
    if order.nnodes == 1 or not order.master_port or not order.master_addr:
        return {"reach": None, "mesh": None}
    door = Door(order.word) if "mesh" in order.wanted and order.nnodes <= MOST_NODES else None
    try:
        return _wait_for_others(order, door) if order.node == 0 else _come(order, door)
    finally:
        if door:
            door.close()


def _window(began: float) -> dict[str, float]:
    """Return when something was tried, by the clock of this node."""
    return {"began": round(began, 3), "ended": round(time.time(), 3)}


# --- the first node ---


def _wait_for_others(order: Order, door: Door | None) -> dict[str, Any]:
    began, here = time.time(), opened(order)
    if here.listener is None:
        return {"reach": {"error": {"kind": "port", "text": here.error}, "came": [], **_window(began)}, "mesh": None}
    hall = _Hall(order, door)
    serve(here.listener, hall.receive)
    hall.wait_for_all()
    stop(here.listener)
    found = {"error": None, "came": sorted(hall.came), "strangers": hall.strangers, **_window(began)}
    return {"reach": found, "mesh": hall.mesh() if door else None}


class _Hall:
    """Where the nodes come together.

    Args:
        order: what is looked at.
        door: of the first node, where all shall connect to all.
    """

    def __init__(self, order: Order, door: Door | None) -> None:
        self._order, self._door = order, door
        self._changed, self._last = threading.Condition(), time.monotonic()
        self._is_closed = False
        self.came: dict[int, tuple[str, int]] = {}
        self.strangers: list[str] = []
        self._done: set[int] = set()

    def receive(self, connection: socket.socket) -> None:
        """Talk with who has connected."""
        address = str(connection.getpeername()[0])
        met = receive(connection, self._order.word)
        if met is None:
            self.strangers.append(address)
            return
        talk, node = met
        door = 0
        try:
            while (said := talk.hear()) == _CLOCK:
                talk.say(repr(time.time()))
            if said.startswith(_MESH):
                door = int(said.split()[1])
        except OSError:
            pass  # It has come, whatever has become of it since.
        self._note(node, talk, door)
        if door:
            self._join(node, talk)
        talk.close()

    def _note(self, node: int, talk: Talk, door: int) -> None:
        with self._changed:
            self.came[node] = (talk.peer, door)
            self._last = time.monotonic()
            self._changed.notify_all()

    def wait_for_all(self) -> None:
        """Wait until all have come, or nobody is to be expected any more."""
        until = time.monotonic() + _ALTOGETHER
        with self._changed:
            while len(self.came) < self._order.nnodes - 1:
                left = min(self._last + PATIENCE, until) - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._is_closed = True
            self._changed.notify_all()

    def _join(self, node: int, talk: Talk) -> None:
        """Tell a node where the others are, and wait until it has tried to connect to them, and until all have."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed)
            doors = {str(other): door for other, door in self.came.items() if door[1] and other != node}
        try:
            talk.say(Door.told({**doors, "0": ("", self._door.port if self._door else 0)}))
            talk.hear(_ALTOGETHER)
        except OSError:
            pass  # It is gone: the others need not wait for it.
        with self._changed:
            self._done.add(node)
            self._changed.notify_all()
            self._changed.wait_for(self._are_done, _ALTOGETHER)

    def _are_done(self) -> bool:
        return self._done >= {0} | {node for node, (_, door) in self.came.items() if door}

    def mesh(self) -> dict[str, Any]:
        """Connect to all others too, and wait until all have."""
        assert self._door
        found = self._door.try_all({node: door for node, door in self.came.items() if door[1]}, 0)
        with self._changed:
            self._done.add(0)
            self._changed.notify_all()
            self._changed.wait_for(self._are_done, _ALTOGETHER)
        return found


# --- the others ---


def _come(order: Order, door: Door | None) -> dict[str, Any]:
    began, since = time.time(), time.monotonic()
    try:
        talk = _greet(order)
        clock = _compared(talk)
        talk.say(f"{_MESH} {door.port}" if door else _BYE)
    except (TalkError, OSError, ValueError) as error:
        kind = error.kind if isinstance(error, TalkError) else "other"
        why = {"kind": kind, "text": str(error)}
        return {"reach": {"error": why, **_took(since), **_window(began)}, "mesh": None}
    found = {"error": None, "address": talk.peer, "clock": clock, **_took(since), **_window(began)}
    joined = _join_mesh(talk, door, order.node) if door else None
    talk.close()
    return {"reach": found, "mesh": joined}


def _took(since: float) -> dict[str, float]:
    return {"seconds": round(time.monotonic() - since, 4)}


def _greet(order: Order) -> Talk:
    """Connect to the first node; it may not listen yet."""
    until, pause = time.monotonic() + PATIENCE, _FIRST_PAUSE
    while True:
        try:
            return greet(order.master_addr, order.master_port, order.word, order.node)
        except TalkError as error:
            if error.kind not in ("refused", "closed") or time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _compared(talk: Talk) -> dict[str, float]:
    """Return how many seconds the first node's clock is ahead of ours, and how well that is known."""
    tries = []
    for _ in range(_TIMES):
        sent, began = time.time(), time.monotonic()
        talk.say(_CLOCK)
        theirs = float(talk.hear())
        took = time.monotonic() - began
        tries.append((took, theirs - (sent + took / 2)))
    took, ahead = min(tries)
    return {"ahead": round(ahead, 6), "within": round(took / 2, 6)}


def _join_mesh(talk: Talk, door: Door, node: int) -> dict[str, Any] | None:
    """Connect to all others, once the first node has told where they are; None where it does not."""
    try:
        doors = Door.read(talk.hear(_ALTOGETHER + PATIENCE), talk.peer)
        found = door.try_all(doors, node)
        talk.say(_BYE)
        talk.hear(_ALTOGETHER)  # The others may not have tried ours yet: the first node ends the talk when all have.
    except (OSError, ValueError):
        return None
    return found
