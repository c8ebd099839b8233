"""Run commands with a time limit, here or through ssh and the like on another machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from allranks.errors import LaunchError

#: Interval for checking whether to end a running command.
_POLL_SECONDS = 0.2
#: Exit code of ssh if it could not run the command.
_SSH_FAILED = 255
_FIXES = {
    "bash": "install bash, or put the directory that it is in on PATH",
    "ssh": "install OpenSSH's client",
    "rsync": "install rsync, here and on all machines",
    "pdsh": "install pdsh, or kind: ssh",
}
#: Message for a connection that ended without an error.
BROKE = "the connection broke"


class Answer(NamedTuple):
    """Result of a command, here or on another machine."""

    code: int
    out: str
    err: str  # Stderr of the command, or of ssh.
    unreached: bool = False  # Whether ssh could not run it at all, or its end is unknown.
    is_late: bool = False  # Whether it did not exit in time; it may have started.

    @property
    def last_words(self) -> str:
        """The last line of stderr, which is the error of ssh and most programs."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        if lines:
            return lines[-1]
        # A multiplexed connection that breaks prints nothing.
        return BROKE if self.unreached else f"exit code {self.code}"


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
    """Run one command; on a timeout end it with its child processes.

    Args:
        sent: text for its stdin.
        seconds: time limit.
        is_over: called repeatedly; returns whether to end the command early.
        hear: called before that with its stdout so far.

    Raises:
        LaunchError: the command does not exist.
    """
    import tempfile  # It imports several modules that commands which only read do not need.

    # No pipe for stderr: before OpenSSH 8.5 the multiplexing master kept it open.
    with tempfile.TemporaryFile() as err:
        with _started(command, environ, cwd, sent, err) as process:
            out, why = _wait(process, seconds, is_over, hear)
        if out is None:
            return Answer(_SSH_FAILED, "", why, unreached=True, is_late=True)
        err.seek(0)
        said = err.read().decode(errors="replace")
        return Answer(process.returncode, out, said, unreached=process.returncode == _SSH_FAILED)


@contextlib.contextmanager
def _started(
    command: Sequence[str], environ: Mapping[str, str], cwd: str | Path | None, sent: str, err: IO[bytes]
) -> Iterator[subprocess.Popen[str]]:
    """Start a process that gets ``sent``; when the block ends, also by Ctrl-C, kill it and its children."""
    process = None
    try:
        with _ctrl_c_later():
            process = _start(command, environ, cwd, err)
            stdin, process.stdin = process.stdin, None
            # In a thread, because a second call of communicate() does not continue to send (3.11).
            threading.Thread(target=_feed, args=(stdin, sent), daemon=True).start()
        yield process
    finally:
        if process:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            with process:  # Closes the pipes, and waits for its exit.
                pass


def _start(
    command: Sequence[str], environ: Mapping[str, str], cwd: str | Path | None, err: IO[bytes]
) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            env=environ,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C at the terminal must not reach it directly.
        )
    except OSError as error:
        raise cannot_run(command[0], error) from error


def cannot_run(program: str, error: OSError) -> LaunchError:
    """Return the error for a program that cannot be started on this machine."""
    return LaunchError(f"cannot run {program}", why=error.strerror, fix=_FIXES.get(program))


@contextlib.contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Defer KeyboardInterrupt to the end of the block: inside Popen it would leave a process behind."""
    # Only Python's default handler raises it, in the main thread.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def _feed(stdin: IO[str], sent: str) -> None:
    with contextlib.suppress(BrokenPipeError), stdin:
        stdin.write(sent)


def _wait(
    process: subprocess.Popen[str], seconds: float | None, is_over: Callable[[], bool], hear: Callable[[str], None]
) -> tuple[str | None, str]:
    """Wait for a process; return its stdout, or None and the reason for not waiting any longer."""
    began = time.monotonic()
    while not is_over():
        left = _POLL_SECONDS if seconds is None else began + seconds - time.monotonic()
        if left <= 0:
            return None, f"no answer within {seconds:g} s"
        try:
            return process.communicate(timeout=min(left, _POLL_SECONDS))[0], ""
        except subprocess.TimeoutExpired as error:
            hear((error.output or b"").decode(errors="replace"))  # The output here is bytes, even for a text pipe.
    return None, "ended before it had answered"
