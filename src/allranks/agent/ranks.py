"""The agent's end of the socket to the starter: start ranks, signal them, learn of their end."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from allranks.agent.rank import RankOrder


@dataclass(frozen=True)
class RankExit:
    """A rank's end: its code as Python tells it, negative for a signal, and when."""

    local_rank: int
    pid: int
    code: int
    time: float


class StarterGoneError(RuntimeError):
    """The process that starts ranks has ended; its ranks died with it."""


class Ranks:
    """The ranks of this node, as the starter tells of them.

    Args:
        channel: the socket to the starter.
        idle: called about 20 times a second while waiting.
        lifeline: descriptor that closes when the launcher is gone, or None.
        launcher_gone: called when it has closed.
    """

    def __init__(
        self,
        channel: socket.socket,
        idle: Callable[[], None],
        lifeline: int | None,
        launcher_gone: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._idle = idle
        self._lifeline = lifeline
        self._launcher_gone = launcher_gone
        self._unread = b""
        self.pids: dict[int, int] = {}  # local rank -> process id, of those alive
        self.exits: list[RankExit] = []  # of this generation, in order

    def start(self, orders: dict[int, RankOrder]) -> dict[int, int]:
        """Start ranks, by local rank; return their process ids once all have been forked."""
        self.exits.clear()
        started: dict[int, int] = {}
        for local_rank, order in orders.items():
            self._send({"start": local_rank, "order": asdict(order)})
        while len(started) < len(orders):
            started |= self._receive(None)
        return started

    def signal(self, number: int) -> None:
        """Send a signal to the process group of every rank that is alive."""
        self._send({"signal": int(number)})

    def quit(self, clean: bool) -> None:
        """Let the starter end; unless ``clean``, with everything that its ranks left behind."""
        self._send({"quit": "clean" if clean else "kill"})
        while True:
            try:
                self._receive(None)
            except StarterGoneError:
                return

    def wait(self, seconds: float) -> bool:
        """Wait until a rank has ended, at most ``seconds``; tell whether one has."""
        known = len(self.exits)
        deadline = time.monotonic() + seconds
        while len(self.exits) == known and (left := deadline - time.monotonic()) > 0:
            self._receive(min(left, 0.05))
            self._idle()
        return len(self.exits) > known

    def _receive(self, timeout: float | None) -> dict[int, int]:
        """Take in what the starter says; return the ranks that it says it has started."""
        watched: list[socket.socket | int] = [self._channel]
        if self._lifeline is not None:
            watched.append(self._lifeline)
        readable, _, _ = select.select(watched, [], [], timeout)
        if self._lifeline in readable:
            self._check_lifeline()
        return self._read() if self._channel in readable else {}

    def _check_lifeline(self) -> None:
        assert self._lifeline is not None
        if not os.read(self._lifeline, 4096):
            self._lifeline = None
            self._launcher_gone()

    def _read(self) -> dict[int, int]:
        data = self._channel.recv(65536)
        if not data:
            raise StarterGoneError("the process that starts ranks has ended")
        *lines, self._unread = (self._unread + data).split(b"\n")
        started = {}
        for message in map(json.loads, lines):
            if "started" in message:
                started[message["started"]] = self.pids[message["started"]] = message["pid"]
            else:
                self._note_exit(RankExit(message["ended"], message["pid"], message["code"], message["time"]))
        return started

    def _note_exit(self, ended: RankExit) -> None:
        del self.pids[ended.local_rank]
        self.exits.append(ended)

    def _send(self, message: dict[str, object]) -> None:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise StarterGoneError("the process that starts ranks has ended") from error
