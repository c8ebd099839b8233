"""An agent of this machine that was started by this process: waited for, signalled, and its end understood."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from allranks import contract, processes
from allranks.clusters import process
from allranks.clusters.happened import Happened
from allranks.runs.status import Handle, State, Status

#: Longer than the time within which the agent takes two signals for one request.
_INSIST_SECONDS = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that tells of a process's end, where the kernel has and allows that."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # An interpreter may have been built without it.
        return None


class ChildAgent:
    """A node's agent, our child; a session of its own, which a terminal's signals reach through us alone.

    Args:
        command: the agent's command.
        environ: its whole environment.
        log: file that takes what it says.
        mode: permissions of that file.
        attached: whether it ends when we end. The pipe to its standard input is its lifeline then: the
            kernel closes it whatever becomes of us.
        stdin: the rank that reads our own standard input, where it is attached.
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
    ) -> None:
        lifeline = {contract.LIFELINE: "1"} if attached else {}
        sink_at = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
        with open(sink_at, "wb") as sink, _own_stdin(attached) as ours, _none_ignored():
            if ours is not None:
                lifeline[contract.STDIN] = f"{ours} {-1 if stdin is None else stdin} {os.getpid()}"
            os.fchmod(sink.fileno(), mode)  # Whatever the umask is.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if attached else subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**environ, **lifeline},
                pass_fds=() if ours is None else (ours,),
                start_new_session=True,
            )
        self._events = log.parent / contract.AGENT_EVENTS
        self._happened = Happened(log.parent)
        self._sent: dict[int, None] = {}  # A set that keeps their order.
        self._insists_at = 0.0
        self._code: int | None = None
        self._pidfd = _pidfd(self._process.pid)
        self.handle: Handle = process.identify(self._process.pid)

    def wait(self, seconds: float) -> bool:
        """Wait until the agent ends, at most so long; tell whether it has ended."""
        if not self._has_ended():
            self._insist()
            if self._pidfd is None:
                process.await_end(self.handle, seconds)
            else:
                select.select([self._pidfd], [], [], seconds)
        return self._has_ended()

    def signal(self, number: int) -> None:
        """Pass a signal on to the agent, which ends the ranks; while it is being set up, to whatever does that."""
        if not self._has_ended():
            self._sent.setdefault(number)
            self._insists_at = time.monotonic() + _INSIST_SECONDS
            processes.signal_group(self._process.pid, number)

    def news(self) -> Sequence[str]:
        """Tell what the agent has told; what else happens on this machine shows in the ranks' own lines."""
        return self._happened.news()

    @property
    def awaited(self) -> str:
        """What is waited for until ranks run."""
        return self._happened.awaited

    @property
    def code(self) -> int | None:
        """The agent's exit code, negative for a signal; None while it runs."""
        return self._code if self._has_ended() else None

    def _insist(self) -> None:
        """Repeat a signal that came during the setup: a process that was just being forked may have missed it.

        Its shell then waits for it, as it does for a program that handles SIGINT itself.
        """
        if self._sent and time.monotonic() >= self._insists_at and not self._events.exists():
            self._insists_at = time.monotonic() + _INSIST_SECONDS
            for number in self._sent:
                processes.signal_group(self._process.pid, number)

    def _has_ended(self) -> bool:
        if self._code is None:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return False
            self._code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            self._bury()
        return True

    def _bury(self) -> None:
        """Reap the agent. While it is a zombie its group's id belongs to nobody else."""
        if self._fatal_signal():
            # It may have been in its setup still, and what did that may have missed the signal.
            processes.signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
        if self._pidfd is not None:
            os.close(self._pidfd)

    def _fatal_signal(self) -> int | None:
        """Return the signal of ours that ended the agent; a shell that sets it up may give it as an exit code.

        Python gives another one where Ctrl-C comes before any code of ours: while it imports ``site`` or ``runpy``. So
        may what a set-up runs. Whatever fails after a signal and before the agent has told anything counts as ended.
        """
        by_name = next((number for number in self._sent if self._code in (-number, 128 + number)), None)
        return by_name or (next(iter(self._sent), None) if self._code and not self._events.exists() else None)

    def understand(self, told: Status) -> Status | None:
        """Tell from its exit code how an agent ended that has told of no end; None if the code says nothing."""
        code = self.code
        if number := self._fatal_signal():
            why = f"got {signal.Signals(number).name}"
            return replace(told, state=State.CANCELLED, native="ended", reason=why, exit_code=128 + number)
        if told.started is None or code is None or code < 0:
            return None
        if code == 0:
            return replace(told, state=State.SUCCEEDED, native="ended", exit_code=0)
        reason = f"ended with exit code {code}; the agent could not tell more: is the disk full?"
        return replace(told, state=State.FAILED, native="ended", reason=reason, exit_code=code)
