"""Agents of this machine: started and followed as a child, or found again by a handle."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from allranks import contract
from allranks.runs.agents import Happened
from allranks.runs.status import Handle, State, Status
from allranks.system import processes
from allranks.system.commands import cannot_run

#: Longer than the time within which the agent takes two signals for one request.
_INSIST_SECONDS = 0.5
#: What processes have to exit after SIGKILL.
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.02
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def this_host() -> str:
    """Return the name of this machine: socket.gethostname(), without its module, which each status would import."""
    return os.uname().nodename


def identify(pid: int) -> Handle:
    """Return a handle that names the process ``pid`` of this machine and no later one."""
    boot = {"boot": processes.boot_id()}
    return Handle(host=this_host(), pid=pid, started=processes.started(pid), extra=boot)


def is_alive(handle: Handle) -> bool:
    """Return whether the handle's process, of this machine, is alive."""
    if handle.pid is None or handle.extra.get("boot") != processes.boot_id():
        return False
    return processes.started(handle.pid) == handle.started is not None


def await_end(handle: Handle, seconds: float) -> bool:
    """Wait until the handle's process has exited, at most ``seconds``; return whether it has."""
    return _wait_until(lambda: not is_alive(handle), seconds)


def send(handle: Handle, number: int) -> None:
    """Send a signal to the process group that the handle's process leads, if it is alive."""
    if is_alive(handle) and handle.pid is not None:
        processes.signal_group(handle.pid, number)


def end_marked(name: str, value: str, patience: float) -> bool:
    """End all processes that were started with a variable of that value; return whether none is left."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, _KILL_SECONDS)):
        for pid in processes.marked(name, value):
            processes.signal_process(pid, number)
        if _wait_until(lambda: not processes.marked(name, value), seconds):
            return True
    return False


def _wait_until(is_over: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_over():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


@contextlib.contextmanager
def _none_ignored() -> Iterator[None]:
    """Ignore no signal while a child is started: it would ignore it too, and a shell script for good.

    A shell lets its background jobs ignore SIGINT, and nohup SIGHUP.
    """
    ignored = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)  # In the child a handler becomes the default again.
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _own_stdin(is_wanted: bool) -> Iterator[int | None]:
    """Give a copy of our stdin to hand on, above the descriptors that shell scripts use; None if it is closed."""
    if not is_wanted or sys.stdin is None:
        yield None
        return
    copy = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 64)
    try:
        yield copy
    finally:
        os.close(copy)


class ChildAgent:
    """A node's agent, our child in a session of its own: a terminal's signals reach it through us alone.

    Args:
        log: file for its output, with the permissions ``mode``.
        attached: whether it ends with us. The pipe to its stdin is its lifeline then, which the kernel closes.
        stdin: the rank that reads our stdin, where it is attached.
        held: whether it starts no ranks before :meth:`release`; it is attached.
    """

    outlives = False

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        mode: int,
        *,
        attached: bool,
        stdin: int | None = None,
        held: bool = False,
    ) -> None:
        lifeline = {contract.LIFELINE: contract.HELD if held else "1"} if attached else {}
        sink_at = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
        with open(sink_at, "wb") as sink, _own_stdin(attached) as ours, _none_ignored():
            if ours is not None:
                lifeline[contract.STDIN] = f"{ours} {-1 if stdin is None else stdin} {os.getpid()}"
            os.fchmod(sink.fileno(), mode)  # Whatever the umask is.
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE if attached else subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    env={**environ, **lifeline},
                    pass_fds=() if ours is None else (ours,),
                    start_new_session=True,
                )
            except OSError as error:
                raise cannot_run(command[0], error) from error
        self._events = log.parent / contract.AGENT_EVENTS
        self._happened = Happened(log.parent)
        self._sent: dict[int, None] = {}  # A set that keeps their order.
        self._insists_at = 0.0
        self._code: int | None = None
        self._pidfd: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # An interpreter may have been built without it.
            self._pidfd = os.pidfd_open(self._process.pid)
        self.handle: Handle = identify(self._process.pid)

    def release(self) -> None:
        """Let an agent that was held start ranks."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # It has exited: its code says why.
            os.write(self._process.stdin.fileno(), b".")  # Unbuffered: closing it must not write it once more.

    def kill(self) -> None:
        """Kill an agent that was held, and whatever was setting it up."""
        processes.signal_group(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def wait(self, seconds: float) -> bool:
        """Wait until the agent exits, at most so long; return whether it has."""
        if self.code is None:
            self._insist()
            if self._pidfd is None:
                await_end(self.handle, seconds)
            else:
                select.select([self._pidfd], [], [], seconds)
        return self.code is not None

    def signal(self, number: int) -> None:
        """Pass a signal on to the agent, which ends the ranks; while it is being set up, to whatever does that."""
        if self.code is None:
            self._sent.setdefault(number)
            self._insists_at = time.monotonic() + _INSIST_SECONDS
            processes.signal_group(self._process.pid, number)

    def news(self) -> Sequence[str]:
        """Return what the agent has reported; what else happens here shows in the ranks' own lines."""
        return self._happened.news()

    @property
    def awaited(self) -> str:
        """What is waited for until ranks run."""
        return self._happened.awaited

    @property
    def code(self) -> int | None:
        """The agent's exit code, negative for a signal; None while it runs."""
        if self._code is None:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                self._reap()
        return self._code

    def _insist(self) -> None:
        """Repeat a signal that came during the setup: a process that was just being forked may have missed it.

        Its shell then waits for it, as it does for a program that handles SIGINT itself.
        """
        if self._sent and time.monotonic() >= self._insists_at and not self._events.exists():
            self._insists_at = time.monotonic() + _INSIST_SECONDS
            for number in self._sent:
                processes.signal_group(self._process.pid, number)

    def _reap(self) -> None:
        """Reap the agent. While it is a zombie no other process gets the id of its group."""
        if self._fatal_signal():
            # It may have been in its set-up still, and what did that may have missed the signal.
            processes.signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
        if self._pidfd is not None:
            os.close(self._pidfd)

    def _fatal_signal(self) -> int | None:
        """Return the signal of ours that ended the agent; a shell that sets it up may give it as an exit code.

        Python gives another code where Ctrl-C comes before any code of ours: while it imports ``site`` or ``runpy``. So
        may what a set-up runs. Whatever fails after a signal and before the agent's first event counts as ended by it.
        """
        by_name = next((number for number in self._sent if self._code in (-number, 128 + number)), None)
        return by_name or (next(iter(self._sent), None) if self._code and not self._events.exists() else None)

    def understand(self, reported: Status) -> Status | None:
        """Return how an agent exited that has reported no end, by its exit code; None if the code does not report."""
        code = self.code
        if number := self._fatal_signal():
            why = f"got {signal.Signals(number).name}"
            return reported._replace(state=State.CANCELLED, native="ended", reason=why, exit_code=128 + number)
        if reported.started is None or code is None or code < 0:
            return None
        if code == 0:
            return reported._replace(state=State.SUCCEEDED, native="ended", exit_code=0)
        reason = f"exited with code {code}; the agent could not report more: is the disk full?"
        return reported._replace(state=State.FAILED, native="ended", reason=reason, exit_code=code)
