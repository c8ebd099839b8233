"""A rank's standard input: that of the command on one rank of this machine; on the others an error that says so.

The rank reads the very terminal or pipe that ``allranks run`` has, and only what its script asks for. It is in a
session of its own, where the kernel does not stop it for reading while the command is in the background: so it waits
itself until the command is back in the foreground.
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
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from allranks import contract, processes
from allranks.errors import RankError, StdinError

_LOOK_SECONDS = 0.2
#: What ``breakpoint()`` calls (PEP 553), in ranks that have no terminal; a user's own choice stays.
_HOOK = "PYTHONBREAKPOINT"
_FIX = "allranks run --stdin 0 gives rank 0 the terminal; so does a run of one rank, here and not detached"


@dataclass(frozen=True)
class Stdin:
    """What a rank has as its standard input.

    Attributes:
        is_ours: whether it is the command's own.
        is_elsewhere: whether the command has one, which another rank or none has got.
        launcher: the command's process id.
    """

    is_ours: bool
    is_elsewhere: bool
    launcher: int

    def open(self) -> io.FileIO:
        """Return what Python's ``sys.stdin`` reads from."""
        if not self.is_ours:
            return _Missing(self.is_elsewhere)
        return _Terminal(self.launcher) if os.isatty(0) else io.FileIO(0, closefd=False)


def connect(rank: str) -> Stdin:
    """Point descriptor 0 of this process at what its rank reads, and have ``breakpoint()`` say where it cannot work."""
    descriptor, owner, launcher = map(int, os.environ.pop(contract.STDIN, "-1 -1 -1").split())
    is_there = _is_open(descriptor)  # A container may close it.
    is_ours = is_there and owner == int(rank)
    is_elsewhere = is_there and not is_ours and not _is_null(descriptor)
    source = descriptor if is_ours else os.open(os.devnull, os.O_RDONLY)
    os.dup2(source, 0)
    for opened in {source, *([descriptor] if is_there else ())}:
        os.close(opened)
    if not is_ours and not os.environ.get(_HOOK):
        name = no_debugger.__name__ if owner < 0 or not is_there else skip_breakpoint.__name__
        os.environ[_HOOK] = f"{__name__}.{name}"
    return Stdin(is_ours, is_elsewhere, launcher)


def no_debugger(*_: object, **__: object) -> None:
    """Take the place of pdb in a rank that has no terminal.

    Raises:
        RankError: always.
    """
    raise RankError("breakpoint() needs a terminal, and no rank of this run has one", fix=_FIX)


def skip_breakpoint(*_: object, **__: object) -> None:
    """Take the place of pdb where another rank has the terminal: what it waits for must go on."""
    os.environ[_HOOK] = "0"  # Python's own way to skip all of them: it is said once.
    print("allranks: note: breakpoint() stops only the rank that --stdin names; the others continue", file=sys.stderr)


class _Missing(io.FileIO):
    """No input: code that waits for a line gets an error, and code that takes all there is gets nothing."""

    def __init__(self, is_elsewhere: bool) -> None:
        super().__init__(0, closefd=False)
        self._is_elsewhere = is_elsewhere

    def readinto(self, _: object, /) -> NoReturn:
        """Refuse.

        Raises:
            StdinError: always.
        """
        why = "ranks cannot share the stdin of allranks run" if self._is_elsewhere else "the run has none"
        raise StdinError("the script reads stdin, which this rank does not have", why=why, fix=_FIX)

    def readall(self) -> bytes:
        """Return nothing, as from /dev/null; refuse where the command has something to read."""
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
            time.sleep(_LOOK_SECONDS)
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


def _is_null(descriptor: int) -> bool:
    return os.fstat(descriptor).st_rdev == Path(os.devnull).stat().st_rdev


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except (OSError, OverflowError):
        return False
    return True
