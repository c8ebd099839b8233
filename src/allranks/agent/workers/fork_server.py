"""The fork server, which forks the ranks of a node, and the agent's client for it.

The server has imported torch if the ranks need it, and done nothing else: it has one thread, and has used neither CUDA
nor a tensor, so forking it is safe. It is a child of the agent. They exchange lines of JSON over a socket; when the
socket closes, the agent is gone, and the server ends all ranks. As the parent of the ranks it is notified when one
exits, and their process ids are not reused before.
"""

from __future__ import annotations

import gc
import json
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

from allranks import contract
from allranks.agent.stop import SIGNALS, WARNINGS
from allranks.agent.workers.rank import RankStart, leave_fork_server
from allranks.errors import LaunchError
from allranks.system.processes import adopt_orphans, children, signal_group, signal_process

#: Seconds between SIGTERM and SIGKILL for processes that ranks have left behind.
_LEFT_PATIENCE = contract.scaled_wait(5.0)
_KILL_PATIENCE = 5.0
_POLL_SECONDS = 0.05


class ForkServer:
    """Starts, signals and reaps ranks for the agent. If the agent dies, ranks get SIGTERM, then ``stop_timeout`` s."""

    def __init__(self, channel: socket.socket, stop_timeout: float) -> None:
        self._channel = channel
        self._stop_timeout = stop_timeout
        self._ranks: dict[int, int] = {}  # process id -> local rank
        self._groups: set[int] = set()  # process groups of all ranks, living or not
        self._killed: set[int] = set()  # groups of failed ranks, until they are empty
        self._unread = b""
        self._leaving = False
        self._clean = False
        self._awake, self._alarm = socket.socketpair()
        for end in (self._awake, self._alarm):
            end.setblocking(False)

    def serve(self) -> RankStart | None:
        """Serve until the agent is done or gone; in a forked child, return the rank to become."""
        gc.disable()
        gc.freeze()  # Pages that the ranks share stay shared when their collectors run.
        adopt_orphans()
        for number in (*SIGNALS, *WARNINGS):
            signal.signal(number, signal.SIG_IGN)  # The agent handles signals; the server exits with it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, *WARNINGS))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._awake, selectors.EVENT_READ, self._reap)
            selector.register(self._channel, selectors.EVENT_READ, self._listen)
            while not self._leaving:
                for key, _ in selector.select():
                    start: RankStart | None = key.data()
                    if start is not None:
                        return start
        self._end(lambda: list(self._ranks), signal_group, self._stop_timeout)
        if self._clean:  # Processes in other sessions are services that the script started deliberately.
            self._end(lambda: list(filter(_has_children, self._groups)), signal_group, _LEFT_PATIENCE)
        else:
            self._end(children, signal_process, _LEFT_PATIENCE)
        self._channel.close()  # The agent need not wait for this process to unload torch.
        return None

    def _listen(self) -> RankStart | None:
        """Handle the agent's requests; in a forked child, return the rank to become."""
        try:
            data = self._channel.recv(65536)
        except ConnectionResetError:
            data = b""  # The agent died with reports unread.
        if not data:
            self._leaving = True
        *lines, self._unread = (self._unread + data).split(b"\n")
        for message in map(json.loads, lines):
            if "start" in message:
                start = RankStart(**message["start"])
                if self._fork(start):
                    return start
            elif "signal" in message:
                for pid, local_rank in self._ranks.items():
                    if message["to"] in (None, local_rank):
                        signal_group(pid, message["signal"])
            else:
                self._leaving, self._clean = True, message["quit"] == "clean"
        return None

    def _fork(self, start: RankStart) -> bool:
        """Fork a rank, and wait until it leads its own session, so no signal is lost; return True in the rank."""
        self._wait_for_killed()
        server = os.getpid()
        try:
            ready, unready = os.pipe()
            pid = os.fork()
        except OSError as error:
            self._report(refused=start.local_rank, why=error.strerror)
            return False
        if pid == 0:
            os.close(ready)
            leave_fork_server(server)
            for end in (self._channel, self._awake, self._alarm):
                end.close()
            os.close(unready)
            return True
        os.close(unready)
        os.read(ready, 1)
        os.close(ready)
        self._ranks[pid] = start.local_rank
        self._groups.add(pid)
        self._report(started=start.local_rank, pid=pid)
        return False

    def _wait_for_killed(self) -> None:
        """Wait until the processes of failed ranks are gone: a new rank may need their CPU or GPU memory."""
        deadline = time.monotonic() + _KILL_PATIENCE
        while any(map(_has_children, self._killed)) and (left := deadline - time.monotonic()) > 0:
            self._await_end(left)
        self._killed.clear()

    def _await_end(self, seconds: float) -> None:
        select.select([self._awake], [], [], min(seconds, 0.2))
        self._reap()

    def _reap(self) -> None:
        """Reap every child that has exited, and report the ranks among them. One SIGCHLD may stand for several."""
        try:
            self._awake.recv(4096)
        except BlockingIOError:
            pass
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            local_rank = self._ranks.pop(pid, None)
            if local_rank is None:
                os.waitpid(pid, 0)  # An adopted orphan.
                continue
            now = time.time()
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            signal_group(pid, signal.SIGKILL if code else signal.SIGTERM)  # A zombie's id is not reused.
            if code:
                self._killed.add(pid)
            _, _, used = os.wait4(pid, 0)
            self._report(ended=local_rank, pid=pid, code=code, time=now, memory=used.ru_maxrss * 1024)

    def _report(self, **message: Any) -> None:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._leaving = True  # The agent is gone.

    def _end(self, alive: Callable[[], Collection[int]], send: Callable[[int, int], None], patience: float) -> None:
        for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, _KILL_PATIENCE)):
            for pid in alive():
                send(pid, number)
            deadline = time.monotonic() + seconds
            while alive() and (left := deadline - time.monotonic()) > 0:
                self._await_end(left)


def _has_children(group: int) -> bool:
    """Return whether a process group contains a child of this process, alive or a zombie."""
    try:
        os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class RankExit(NamedTuple):
    """A rank's exit: code as in subprocess (negative for a signal), time (seconds since 1970), peak memory in bytes."""

    local_rank: int
    pid: int
    code: int
    time: float
    memory: int = 0


class ForkServerGoneError(RuntimeError):
    """The fork server has exited, and its ranks with it."""


class Connection(Protocol):
    """This node's connection to the others, which :meth:`ForkClient.wait` serves too."""

    @property
    def descriptors(self) -> list[Any]:
        """Descriptors to poll: if one is readable, call :meth:`tick`."""

    def tick(self) -> bool:
        """Exchange messages; return whether any came."""


class ForkClient:
    """The agent's end of the socket to the fork server.

    While it waits it calls ``idle`` about 20 times a second, and ``check``, which may raise, until the server exits.
    """

    def __init__(self, channel: socket.socket, idle: Callable[[], None], check: Callable[[], None]) -> None:
        self.pids: dict[int, int] = {}  # Process ids of living ranks, by local rank.
        self.exits: list[RankExit] = []  # Since the last start(), in order.
        self.coordinator: Connection | None = None  # Served by wait() too.
        self._channel = channel
        self._idle = idle
        self._check = check
        self._unread = b""

    def start(self, starts: list[RankStart]) -> dict[int, int]:
        """Start ranks; return their process ids by local rank; raise a LaunchError if the process limit is reached."""
        self._check()
        self.exits.clear()
        started: dict[int, int] = {}
        for start in starts:
            self._send({"start": start._asdict()})
            # One at a time: two processes that both write to a full socket would deadlock.
            while start.local_rank not in started:
                started |= self._read()
        return started

    def signal(self, number: int, local_rank: int | None = None) -> None:
        """Send a signal to the process group of a living rank, or of all of them."""
        self._send({"signal": int(number), "to": local_rank})

    def quit(self, clean: bool) -> None:
        """Let the server exit; unless ``clean``, it first ends all processes that ranks left behind."""
        try:
            self._send({"quit": "clean" if clean else "kill"})
            while True:
                self._receive(_POLL_SECONDS)
                self._idle()
        except ForkServerGoneError:
            return

    def wait(self, seconds: float) -> None:
        """Wait until a rank exits or the coordinator sends a message, but at most ``seconds``."""
        known = len(self.exits)
        deadline = time.monotonic() + seconds
        while len(self.exits) == known and (left := deadline - time.monotonic()) > 0:
            self._check()
            self._receive(min(left, _POLL_SECONDS))
            self._idle()
            if self.coordinator and self.coordinator.tick():
                break

    def _receive(self, timeout: float) -> None:
        poll = select.poll()  # Not select(), which is limited to descriptors below 1024, and node 0 may have more.
        for descriptor in (self._channel, *(self.coordinator.descriptors if self.coordinator else ())):
            poll.register(descriptor, select.POLLIN)
        if any(descriptor == self._channel.fileno() for descriptor, _ in poll.poll(timeout * 1000)):
            self._read()

    def _read(self) -> dict[int, int]:
        """Read the server's reports; return the process ids of newly started ranks, by local rank."""
        try:
            data = self._channel.recv(65536)
        except OSError:
            data = b""
        if not data:
            raise ForkServerGoneError("the process that starts ranks has ended")
        *lines, self._unread = (self._unread + data).split(b"\n")
        started, refusal = {}, None
        for message in map(json.loads, lines):
            if "started" in message:
                started[message["started"]] = self.pids[message["started"]] = message["pid"]
            elif "refused" in message:
                fix = "fewer ranks (--nproc-per-node), or higher limits (ulimit -u, ulimit -n)"
                refusal = LaunchError(f"cannot start local rank {message['refused']}", why=message["why"], fix=fix)
            else:
                del self.pids[message["ended"]]
                self.exits.append(RankExit(message.pop("ended"), **message))
        if refusal:
            raise refusal
        return started

    def _send(self, message: dict[str, object]) -> None:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ForkServerGoneError("the process that starts ranks has ended") from error
