"""The process that starts ranks: it has imported torch (if they need it) and done nothing else.

It has one thread and touches neither CUDA nor a tensor, so forking it is safe. It talks to the agent, its
parent, through one socket, in lines of JSON; when that socket closes the agent is gone, and it ends all ranks.
It is the ranks' parent, so it learns of their end at once and no process id is reused under it.
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
from typing import Any

from allranks import contract
from allranks.agent.rank import RankOrder, leave_starter
from allranks.agent.stop import SIGNALS, WARNINGS
from allranks.agent.system import adopt_orphans, children
from allranks.processes import signal_group, signal_process

#: What ranks have left behind gets this long to leave after SIGTERM.
_LEFT_PATIENCE = contract.scaled_wait(5.0)
_KILL_PATIENCE = 5.0


class Starter:
    """Starts, signals and reaps ranks on the agent's orders.

    Args:
        channel: the socket to the agent.
        stop_timeout: seconds that ranks get after SIGTERM when the agent is gone.
    """

    def __init__(self, channel: socket.socket, stop_timeout: float) -> None:
        self._channel = channel
        self._stop_timeout = stop_timeout
        self._ranks: dict[int, int] = {}  # process id -> local rank
        self._groups: set[int] = set()  # of all ranks that there ever were
        self._killed: set[int] = set()  # of ranks that failed, until nothing of them is left
        self._unread = b""
        self._leaving = False
        self._clean = False
        self._awake, self._alarm = socket.socketpair()
        for end in (self._awake, self._alarm):
            end.setblocking(False)

    def serve(self) -> RankOrder | None:
        """Serve until the agent is done or gone; in a forked child, return the order that it is to become."""
        gc.disable()
        gc.freeze()  # Pages that the ranks share stay shared when their collectors run.
        adopt_orphans()
        for number in (*SIGNALS, *WARNINGS):
            signal.signal(number, signal.SIG_IGN)  # The agent decides, and its end is ours.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, *WARNINGS))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._awake, selectors.EVENT_READ, self._reap)
            selector.register(self._channel, selectors.EVENT_READ, self._listen)
            order = self._loop(selector)
        if order is None:
            self._end_all()
            self._channel.close()  # The agent need not wait for the rest: to unload torch takes its time.
        return order

    def forget(self) -> None:
        """Close what belongs to the starter, in a forked child."""
        for end in (self._channel, self._awake, self._alarm):
            end.close()

    def _loop(self, selector: selectors.BaseSelector) -> RankOrder | None:
        while not self._leaving:
            for key, _ in selector.select():
                order: RankOrder | None = key.data()
                if order is not None:
                    return order
        return None

    def _listen(self) -> RankOrder | None:
        data = self._channel.recv(65536)
        if not data:
            self._leaving = True
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            order = self._obey(json.loads(line))
            if order is not None:
                return order
        return None

    def _obey(self, message: dict[str, Any]) -> RankOrder | None:
        if "start" in message:
            return self._start(message["start"], RankOrder(**message["order"]))
        if "signal" in message:
            for pid, local_rank in self._ranks.items():
                if message["to"] in (None, local_rank):
                    signal_group(pid, message["signal"])
        if "quit" in message:
            self._leaving, self._clean = True, message["quit"] == "clean"
        return None

    def _start(self, local_rank: int, order: RankOrder) -> RankOrder | None:
        """Fork a rank, and go on once it has a session of its own: from then on no signal to it is lost."""
        self._wait_for_killed()
        me = os.getpid()
        try:
            ready, unready = os.pipe()
            pid = os.fork()
        except OSError as error:
            self._say(refused=local_rank, why=error.strerror)
            return None
        if pid == 0:
            os.close(ready)
            leave_starter(me)
            os.close(unready)
            return order
        os.close(unready)
        os.read(ready, 1)
        os.close(ready)
        self._ranks[pid] = local_rank
        self._groups.add(pid)
        self._say(started=local_rank, pid=pid)
        return None

    def _wait_for_killed(self) -> None:
        """Wait until the processes of failed ranks are gone: a new rank may need their memory, or their GPU's."""
        deadline = time.monotonic() + _KILL_PATIENCE
        while any(map(_has_children, self._killed)) and (left := deadline - time.monotonic()) > 0:
            select.select([self._awake], [], [], min(left, 0.2))
            self._reap()
        self._killed.clear()

    def _reap(self) -> None:
        """Bury every child that has ended. SIGCHLD wakes us; one may stand for several."""
        try:
            self._awake.recv(4096)
        except BlockingIOError:
            pass
        while (pid := _ended_child()) is not None:
            self._bury(pid)

    def _bury(self, pid: int) -> None:
        """Note a child's end. While it is a zombie its id, and so its group's, belongs to nobody else."""
        local_rank = self._ranks.pop(pid, None)
        if local_rank is None:
            os.waitpid(pid, 0)  # An orphan that we had adopted.
            return
        ended = time.time()
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert status is not None
        code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        signal_group(pid, signal.SIGKILL if code else signal.SIGTERM)
        if code:
            self._killed.add(pid)
        _, _, used = os.wait4(pid, 0)
        self._say(ended=local_rank, pid=pid, code=code, time=ended, memory=used.ru_maxrss * 1024)

    def _say(self, **message: Any) -> None:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._leaving = True  # The agent is gone.

    def _end_all(self) -> None:
        """Leave nobody behind: the ranks, then what they left; in other sessions too, unless all ended well."""
        self._end(lambda: list(self._ranks), signal_group, self._stop_timeout)
        self._end(self._left_in_groups if self._clean else children, signal_process, _LEFT_PATIENCE)

    def _left_in_groups(self) -> list[int]:
        return [pid for pid in children() if _group(pid) in self._groups]

    def _end(self, alive: Callable[[], Collection[int]], send: Callable[[int, int], None], patience: float) -> None:
        for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, _KILL_PATIENCE)):
            for pid in alive():
                send(pid, number)
            deadline = time.monotonic() + seconds
            while alive() and (left := deadline - time.monotonic()) > 0:
                select.select([self._awake], [], [], min(left, 0.2))
                self._reap()


def _ended_child() -> int | None:
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended else None


def _has_children(group: int) -> bool:
    """Tell whether a child of ours is in a process group, alive or not reaped."""
    try:
        os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
