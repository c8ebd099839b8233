"""A rank's standard streams.

Output: an interpreter buffers 8 kB if stdout is a file. Here every line is flushed, so that it is visible while the
rank runs, and not lost if the rank is killed. Thousands of lines per second are a flood: a temporary thread flushes
them together, every few milliseconds.

Input: one rank on this machine has the stdin of the command; on the others, reading raises an error. The rank reads the
same terminal or pipe as ``allranks run``, and only as much as its script reads. Since it is in another session, the
kernel does not stop it for reading while the command is in the background; so the rank waits until the command is in
the foreground.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from allranks import contract
from allranks.errors import RankError, StdinError
from allranks.system import processes

_BUFFER = 1 << 16
#: At least _MANY lines within _WINDOW seconds are a flood, and are flushed every _INTERVAL seconds.
_WINDOW = 0.01
_MANY = 20
_INTERVAL = 0.02
_POLL_SECONDS = 0.2
#: The variable that names the function of ``breakpoint()`` (PEP 553); a user's value stays.
_HOOK = "PYTHONBREAKPOINT"
_FIX = "allranks run --stdin 0 gives rank 0 the terminal, and only it may read; so does a run of one rank, not detached"


class _FloodGauge(io.BufferedWriter):
    """Calls ``on_flood`` when flushes come too fast."""

    def __init__(self, raw: io.RawIOBase, on_flood: Callable[[], None]) -> None:
        super().__init__(raw, _BUFFER)
        self._on_flood = on_flood
        self._flushes = 0
        self._window_ends = 0.0

    def flush(self) -> None:
        super().flush()
        self._flushes += 1
        if self._flushes >= _MANY:
            now = time.monotonic()
            is_flood = now < self._window_ends
            self._flushes, self._window_ends = 0, now + _WINDOW
            if is_flood:
                self._on_flood()


class RankStream(io.TextIOWrapper):
    """A text stream flushed per line, or by a thread in a flood. An explicit flush always works at once."""

    def __init__(self, raw: io.RawIOBase, encoding: str, errors: str | None) -> None:
        buffer = _FloodGauge(raw, self._begin_flood)
        super().__init__(buffer, encoding=encoding, errors=errors, line_buffering=True)
        self._raw = raw
        self._flusher: threading.Thread | None = None
        self._stop = threading.Event()
        os.register_at_fork(before=self._end_flood)

    def close(self) -> None:
        """Flush and close."""
        self._end_flood()
        super().close()

    def _begin_flood(self) -> None:
        # An exiting interpreter does not wait for a new thread.
        if self._flusher is None and threading.main_thread().is_alive():
            self._stop.clear()
            self._flusher = threading.Thread(target=self._flush_until_calm, name="allranks-flush")
            self.reconfigure(line_buffering=False)
            self._flusher.start()

    def _end_flood(self) -> None:
        """Stop the flusher: a fork must not happen while the flusher holds the buffer's lock or the buffer has text."""
        flusher = self._flusher
        if flusher and flusher is not threading.current_thread():
            self._stop.set()
            flusher.join()

    def _flush_until_calm(self) -> None:
        # No Python code may run between this object and the buffer, or the interpreter could switch to the thread that
        # prints. So the buffer's write() is the one in C.
        seen = -1
        while not self._stop.is_set() and seen != self._raw_end():
            seen = self._raw_end()
            self._stop.wait(_INTERVAL)
            if not self._try(self.flush) and threading.main_thread().is_alive():
                seen = -1  # The disk is full, which the script's own prints report: retry.
        while not self._try(lambda: self.reconfigure(line_buffering=True)):  # Fails on a full pipe too.
            if self._stop.wait(_INTERVAL) or not threading.main_thread().is_alive():
                break
        self._try(self.flush)
        self._flusher = None

    def _raw_end(self) -> int:
        """Return the file position; 0 for a pipe, which has none, so that a flood there ends after one flush."""
        if self._raw.closed:
            return -1
        try:
            return self._raw.tell()
        except OSError:
            return 0

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except (BrokenPipeError, ValueError):
            pass  # No reader is left, which the script's own prints report; or the script closed the stream.
        except OSError:
            return False
        return True


def connect(rank: str) -> io.FileIO:
    """Redirect descriptor 0 to the input of this rank, and make ``breakpoint()`` explain where it cannot work.

    Returns:
        The raw file for ``sys.stdin``.
    """
    descriptor, owner, launcher = map(int, os.environ.pop(contract.STDIN, "-1 -1 -1").split())
    is_there = _is_open(descriptor)  # A container may close it.
    is_ours = is_there and owner == int(rank)
    is_elsewhere = is_there and not is_ours and os.fstat(descriptor).st_rdev != Path(os.devnull).stat().st_rdev
    source = descriptor if is_ours else os.open(os.devnull, os.O_RDONLY)
    os.dup2(source, 0)
    for opened in {source, *([descriptor] if is_there else ())}:
        os.close(opened)
    if is_ours:
        return _Terminal(launcher) if os.isatty(0) else io.FileIO(0, closefd=False)
    if not os.environ.get(_HOOK):
        name = no_debugger.__name__ if owner < 0 or not is_there else skip_breakpoint.__name__
        os.environ[_HOOK] = f"{__name__}.{name}"
    return _Missing(owner, is_elsewhere)


def no_debugger(*_: object, **__: object) -> None:
    """Replace pdb in a rank without a terminal: raise a RankError."""
    raise RankError("breakpoint() needs a terminal, and no rank of this run has one", fix=_FIX)


def skip_breakpoint(*_: object, **__: object) -> None:
    """Replace pdb where another rank has the terminal: print a note once, and continue."""
    os.environ[_HOOK] = "0"  # Python then skips all later ones.
    print("allranks: note: breakpoint() stops only the rank that --stdin names; the others continue", file=sys.stderr)


class _Missing(io.FileIO):
    """An empty stdin: reading a line raises an error, and reading all returns nothing."""

    def __init__(self, owner: int, is_elsewhere: bool) -> None:
        super().__init__(0, closefd=False)
        self._owner, self._is_elsewhere = owner, is_elsewhere

    def readinto(self, _: object, /) -> NoReturn:
        """Raise a StdinError."""
        why, fix = "ranks cannot share the stdin of allranks run" if self._is_elsewhere else "the run has none", _FIX
        if self._owner >= 0:
            why = f"--stdin gives it to rank {self._owner} alone"
            fix = f'read it on that rank only: if os.environ["RANK"] == "{self._owner}": ...'
        raise StdinError("the script reads stdin, which this rank does not have", why=why, fix=fix)

    def readall(self) -> bytes:
        """Return nothing, as from /dev/null; raise if the command has input."""
        if self._is_elsewhere:
            self.readinto(b"")
        return b""


class _Terminal(io.FileIO):
    """The command's terminal, read while the command is in the foreground."""

    def __init__(self, launcher: int) -> None:
        super().__init__(0, closefd=False)
        self._launcher = launcher

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Read the typed text, and end the prompt's line in the log."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        while poll.poll() and not processes.is_in_foreground(self._launcher):
            time.sleep(_POLL_SECONDS)
        count = super().readinto(buffer)
        with contextlib.suppress(OSError, termios.error):
            if termios.tcgetattr(0)[3] & termios.ECHO:  # Not for a password: getpass ends the line.
                _end_lines()
        return count or 0


def _end_lines() -> None:
    """Write the line break that the user typed to each log whose last line is unfinished."""
    for descriptor in (1, 2):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            with open(f"/proc/self/fd/{descriptor}", "rb") as log:
                if log.seek(0, os.SEEK_END):
                    log.seek(-1, os.SEEK_END)
                    if log.read(1) != b"\n":
                        os.write(descriptor, contract.TYPED)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except (OSError, OverflowError):
        return False
    return True
