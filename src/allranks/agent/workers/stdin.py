"""A rank's standard input: that of the command on one rank of this machine; on the others an error that says so.

The rank reads the very terminal or pipe that ``allranks run`` has, and only what its script reads. It is in another
session, where the kernel does not stop it for reading while the command is in the background: so the rank itself waits
until the command is back in the foreground.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
import termios
import time
from pathlib import Path
from typing import NoReturn

from allranks import contract
from allranks.errors import RankError, StdinError
from allranks.system import processes

_POLL_SECONDS = 0.2
#: What ``breakpoint()`` calls (PEP 553), in ranks that have no terminal; a user's own choice stays.
_HOOK = "PYTHONBREAKPOINT"
_FIX = "allranks run --stdin 0 gives rank 0 the terminal; so does a run of one rank, here and not detached"


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
    return _Missing(is_elsewhere)


def no_debugger(*_: object, **__: object) -> None:
    """Take the place of pdb in a rank that has no terminal: raise a RankError."""
    raise RankError("breakpoint() needs a terminal, and no rank of this run has one", fix=_FIX)


def skip_breakpoint(*_: object, **__: object) -> None:
    """Take the place of pdb where another rank has the terminal, and may wait for this one."""
    os.environ[_HOOK] = "0"  # Python's own way to skip all of them: the note comes once.
    print("allranks: note: breakpoint() stops only the rank that --stdin names; the others continue", file=sys.stderr)


class _Missing(io.FileIO):
    """No input: code that reads a line gets an error, and code that reads all of it gets nothing."""

    def __init__(self, is_elsewhere: bool) -> None:
        super().__init__(0, closefd=False)
        self._is_elsewhere = is_elsewhere

    def readinto(self, _: object, /) -> NoReturn:
        """Raise a StdinError."""
        why = "ranks cannot share the stdin of allranks run" if self._is_elsewhere else "the run has none"
        raise StdinError("the script reads stdin, which this rank does not have", why=why, fix=_FIX)

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
