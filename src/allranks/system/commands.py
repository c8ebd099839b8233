"""Run commands with a time limit, here or through ssh and the like on another machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from allranks.errors import LaunchError

#: How often a command that is waited for may be ended.
_POLL_SECONDS = 0.2
#: The exit code of ssh itself, where it could not run the command.
_OF_SSH = 255
_PACKAGES = {"ssh": "OpenSSH's client", "rsync": "rsync, here and on all machines", "pdsh": "pdsh, or kind: ssh"}
#: What is said of a connection that ended without a word.
BROKE = "the connection broke"


@dataclass(frozen=True)
class Answer:
    """Result of a command on another machine.

    Attributes:
        code: its exit code.
        out: its stdout.
        err: its stderr, or that of ssh.
        unreached: whether ssh could not run it at all, or its end is unknown.
        is_late: whether it had started, perhaps, and has not exited in time.
    """

    code: int
    out: str
    err: str
    unreached: bool = False
    is_late: bool = False

    @property
    def last_words(self) -> str:
        """The last line of stderr, where ssh and most programs say what is wrong."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        # A connection that was kept, and breaks, ends without a word.
        return lines[-1] if lines else BROKE if self.unreached else f"exit code {self.code}"


def run_one(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    cwd: str | Path | None = None,
    sent: str = "",
    seconds: float | None = None,
    is_over: Callable[[], bool] = lambda: False,
    hear: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Run one command; end it, and what it has started, when its time is over.

    Args:
        command: the command.
        environ: its environment.
        cwd: its working directory.
        sent: its stdin.
        seconds: how long it may take.
        is_over: called now and then; returns whether to end it before.
        hear: called before that with all that it has written to stdout so far.

    Raises:
        LaunchError: there is no such command.
    """
    # No pipe for stderr: before OpenSSH 8.5, who keeps the connection kept it open.
    with tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C at the terminal is ours to pass on.
            )
        except OSError as error:
            fix = f"install {_PACKAGES[command[0]]}" if command[0] in _PACKAGES else None
            raise LaunchError(f"cannot run {command[0]}", why=error.strerror, fix=fix) from error
        with process:
            stdin, process.stdin = process.stdin, None
            # In a thread: the second of two calls of communicate() sends nothing more (3.11).
            threading.Thread(target=_feed, args=(stdin, sent), daemon=True).start()
            out, why = _wait(process, seconds, is_over, hear)
        if out is None:
            return Answer(_OF_SSH, "", why, unreached=True, is_late=True)
        err.seek(0)
        said = err.read().decode(errors="replace")
        return Answer(process.returncode, out, said, unreached=process.returncode == _OF_SSH)


def _feed(stdin: IO[str], sent: str) -> None:
    with contextlib.suppress(BrokenPipeError), stdin:
        stdin.write(sent)


def _wait(
    process: subprocess.Popen[str], seconds: float | None, is_over: Callable[[], bool], hear: Callable[[str], None]
) -> tuple[str | None, str]:
    """Wait for a process; return its stdout, or None and why it was killed with what it had started."""
    began = time.monotonic()
    try:
        while not is_over():
            left = _POLL_SECONDS if seconds is None else began + seconds - time.monotonic()
            if left <= 0:
                return None, f"no answer within {seconds:g} s"
            try:
                return process.communicate(timeout=min(left, _POLL_SECONDS))[0], ""
            except subprocess.TimeoutExpired as error:
                hear((error.output or b"").decode(errors="replace"))  # Bytes, although the pipe is one of text.
        return None, "ended before it had answered"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
