"""A rank's standard streams.

Output: each line is in its file at once, and a flood of lines does not cost a call each. A plain interpreter whose
stdout is a file keeps 8 kB back. Here every line is flushed, so that it can be seen while the rank runs and is there
when the rank is killed. Thousands of lines a second are a flood: they are flushed together, every few milliseconds, by
a thread that lives for the flood.

Input: that of the command on one rank of this machine; on the others an error that says so. The rank reads the very
terminal or pipe that ``allranks run`` has, and only what its script reads. It is in another session, where the kernel
does not stop it for reading while the command is in the background: so the rank itself waits until the command is back
in the foreground.
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
#: What ``breakpoint()`` calls (PEP 553), in ranks that have no terminal; a user's own choice stays.
_HOOK = "PYTHONBREAKPOINT"
_FIX = "allranks run --stdin 0 gives rank 0 the terminal, and only it may read; so does a run of one rank, not detached"


class _FloodGauge(io.BufferedWriter):
    """Calls ``on_flood`` when flushes come in floods."""

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
    """Text that is flushed line by line, or in a flood by a thread. An explicit flush is always done at once."""

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
        # An exiting interpreter would not wait for a new thread.
        if self._flusher is None and threading.main_thread().is_alive():
            self._stop.clear()
            self._flusher = threading.Thread(target=self._flush_until_calm, name="allranks-flush")
            self.reconfigure(line_buffering=False)
            self._flusher.start()

    def _end_flood(self) -> None:
        """Stop the flusher: a fork must not happen while it holds the buffer, nor find text in it."""
        flusher = self._flusher
        if flusher and flusher is not threading.current_thread():
            self._stop.set()
            flusher.join()

    def _flush_until_calm(self) -> None:
        # No Python code may run while text goes from this object to the buffer: the interpreter could switch to the
        # thread that prints. So the buffer's write() is C's own.
        seen = -1
        while not self._stop.is_set() and seen != self._raw_end():
            seen = self._raw_end()
            self._stop.wait(_INTERVAL)
            if not self._try(self.flush) and threading.main_thread().is_alive():
                seen = -1  # The disk is full, as the script's own lines show: try until there is room again.
        while not self._try(lambda: self.reconfigure(line_buffering=True)):  # A pipe without room refuses that too.
            if self._stop.wait(_INTERVAL) or not threading.main_thread().is_alive():
                break
        self._try(self.flush)
        self._flusher = None

    def _raw_end(self) -> int:
        """Return how much is written; of a pipe, which has no position, 0: a flood there is calm after a flush."""
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
            pass  # No reader is left, as the script's own lines show; or the script closed it.
        except OSError:
            return False
        return True


def connect(rank: str) -> io.FileIO:
    """Redirect descriptor 0 to what this process's rank reads, and have ``breakpoint()`` say where it cannot work.

    Returns:
        What Python's ``sys.stdin`` reads from.
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
    """Take the place of pdb in a rank that has no terminal: raise a RankError."""
    raise RankError("breakpoint() needs a terminal, and no rank of this run has one", fix=_FIX)


def skip_breakpoint(*_: object, **__: object) -> None:
    """Take the place of pdb where another rank has the terminal, and may wait for this one."""
    os.environ[_HOOK] = "0"  # Python's own way to skip all of them: the note comes once.
    print("allranks: note: breakpoint() stops only the rank that --stdin names; the others continue", file=sys.stderr)


class _Missing(io.FileIO):
    """No input: code that reads a line gets an error, and code that reads all of it gets nothing."""

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
        """Return nothing, as from /dev/null; raise if the command has something to read."""
        if self._is_elsewhere:
            self.readinto(b"")
        return b""


class _Terminal(io.FileIO):
    """The command's terminal, read while the command is in the foreground."""

    def __init__(self, launcher: int) -> None:
        super().__init__(0, closefd=False)
        self._launcher = launcher

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Read what was typed, and end the line of the log in which the prompt stands."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        while poll.poll() and not processes.is_in_foreground(self._launcher):
            time.sleep(_POLL_SECONDS)
        count = super().readinto(buffer)
        with contextlib.suppress(OSError, termios.error):
            if termios.tcgetattr(0)[3] & termios.ECHO:  # Not for a password, after which getpass ends the line.
                _end_lines()
        return count or 0


def _end_lines() -> None:
    """Write the line break that the terminal has shown and no log has, where a log's last line is unfinished."""
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
