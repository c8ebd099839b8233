"""The agent's end of the socket to the starter: start ranks, signal them, learn of their end."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from allranks.agent.rank import RankOrder
from allranks.errors import LaunchError

_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class RankExit:
    """A rank's end: its code as Python tells it, negative for a signal, when, and the bytes that it held at most."""

    local_rank: int
    pid: int
    code: int
    time: float
    memory: int = 0


class Listening(Protocol):
    """Somebody else who is to hear what comes while the agent waits for its ranks."""

    @property
    def descriptors(self) -> list[Any]:
        """What to select on."""

    def tick(self) -> bool:
        """Take in what came; tell whether the wait is to end for that."""


class StarterGoneError(RuntimeError):
    """The process that starts ranks has ended; its ranks died with it."""


class Ranks:
    """The ranks of this node, as the starter tells of them.

    Args:
        channel: the socket to the starter.
        idle: called about 20 times a second while waiting.
        check: likewise, but for the end; may raise.
    """

    def __init__(self, channel: socket.socket, idle: Callable[[], None], check: Callable[[], None]) -> None:
        self._channel = channel
        self._idle = idle
        self._check = check
        self._unread = b""
        self._refused: str | None = None
        self._other: Listening | None = None
        self.pids: dict[int, int] = {}  # local rank -> process id, of those alive
        self.exits: list[RankExit] = []  # of this generation, in order

    def attend(self, other: Listening) -> None:
        """Have somebody else hear what comes for him, too, in every :meth:`wait`."""
        self._other = other

    def start(self, orders: dict[int, RankOrder]) -> dict[int, int]:
        """Start ranks, by local rank; return their process ids once all have been forked.

        Raises:
            LaunchError: the system allows no further process.
        """
        self._check()
        self.exits.clear()
        started: dict[int, int] = {}
        for local_rank, order in orders.items():
            self._send({"start": local_rank, "order": asdict(order)})
            # One by one: two processes that both wait for room in the socket would wait for ever.
            while local_rank not in started:
                started |= self._read()
                self._raise_refusal(local_rank)
        return started

    def signal(self, number: int, local_rank: int | None = None) -> None:
        """Send a signal to the process group of a rank, or of every rank, that is alive."""
        self._send({"signal": int(number), "to": local_rank})

    def quit(self, clean: bool) -> None:
        """Let the starter end; unless ``clean``, with everything that its ranks left behind."""
        try:
            self._send({"quit": "clean" if clean else "kill"})
            while True:
                self._receive(_LOOK_SECONDS)
                self._idle()
        except StarterGoneError:
            return

    def wait(self, seconds: float) -> bool:
        """Wait until a rank has ended, or something else was heard, at most ``seconds``; tell whether a rank has."""
        known = len(self.exits)
        deadline = time.monotonic() + seconds
        while len(self.exits) == known and (left := deadline - time.monotonic()) > 0:
            self._check()
            self._receive(min(left, _LOOK_SECONDS))
            self._idle()
            if self._other and self._other.tick():
                break
        return len(self.exits) > known

    def _receive(self, timeout: float) -> None:
        """Take in what the starter says, if it does so in time."""
        poll = select.poll()  # Not select(), which knows no descriptors above 1023: node 0 may hear many others.
        for descriptor in (self._channel, *(self._other.descriptors if self._other else ())):
            poll.register(descriptor, select.POLLIN)
        if any(descriptor == self._channel.fileno() for descriptor, _ in poll.poll(timeout * 1000)):
            self._read()

    def _read(self) -> dict[int, int]:
        """Take in what the starter says next; return the ranks that it says it has started."""
        try:
            data = self._channel.recv(65536)
        except OSError as error:
            raise StarterGoneError("the process that starts ranks has ended") from error
        if not data:
            raise StarterGoneError("the process that starts ranks has ended")
        *lines, self._unread = (self._unread + data).split(b"\n")
        started = {}
        for message in map(json.loads, lines):
            if "started" in message:
                started[message["started"]] = self.pids[message["started"]] = message["pid"]
            elif "refused" in message:
                self._refused = message["why"]
            else:
                fields = (message[name] for name in ("ended", "pid", "code", "time", "memory"))
                self._note_exit(RankExit(*fields))
        return started

    def _raise_refusal(self, local_rank: int) -> None:
        if self._refused is not None:
            raise LaunchError(
                f"cannot start local rank {local_rank}",
                why=self._refused,
                fix="fewer ranks (--nproc-per-node), or higher limits (ulimit -u, ulimit -n)",
            )

    def _note_exit(self, ended: RankExit) -> None:
        del self.pids[ended.local_rank]
        self.exits.append(ended)

    def _send(self, message: dict[str, object]) -> None:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise StarterGoneError("the process that starts ranks has ended") from error
