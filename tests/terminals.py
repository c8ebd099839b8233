"""A command in a terminal, and a person who types there."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from waiting import PATIENCE


class Terminal:
    """A command in a terminal of its own, and a person who types there."""

    def __init__(self, lab: Any, *words: str) -> None:
        self._end, inner = pty.openpty()
        # A session of its own, whose terminal this is: Ctrl-C comes from there.
        command = ["setsid", "--ctty", sys.executable, "-m", "allranks", *words]
        self.process = subprocess.Popen(command, cwd=lab.folder, env=lab.env, stdin=inner, stdout=inner, stderr=inner)
        os.close(inner)
        self.shown, self._seen = "", 0

    def type(self, text: str) -> None:
        """Type something."""
        os.write(self._end, text.encode())

    @property
    def edits_lines(self) -> bool:
        """Whether the terminal shows what is typed and passes it on in lines, as it does before a command starts."""
        flags = termios.ICANON | termios.ECHO
        return termios.tcgetattr(self._end)[3] & flags == flags

    def read_until(self, pattern: str, seconds: float = PATIENCE) -> re.Match[str]:
        """Read until something is shown after what was found before, and return it."""
        deadline = time.monotonic() + seconds
        while not (found := re.compile(pattern).search(self.shown, self._seen)):
            assert self._read(deadline), f"no {pattern!r} in {self.shown[self._seen :]!r}"
        self._seen = found.end()
        return found

    def wait(self, seconds: float = PATIENCE) -> int:
        """Read to the end, and return the exit code."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        """Take the terminal away, as a window that is closed."""
        if self._end >= 0:
            os.close(self._end)
        self._end = -1

    def _read(self, deadline: float) -> bool:
        """Read more; tell whether there may be any after it."""
        if not select.select([self._end], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        with suppress(OSError):  # EIO: nobody has the terminal open any more.
            self.shown += os.read(self._end, 65536).decode(errors="replace")
            return True
        return False


class Tmux:
    """A command in tmux, a terminal that knows what its screen shows.

    Args:
        lab: whose directory and environment it has.
        socket: a path for tmux's own use; it stays, with what the command has left on its screen, until ``close``.
        size: columns and lines.
        words: the command's.
    """

    def __init__(self, lab: Any, socket: Path, size: tuple[int, int], *words: str) -> None:
        self._tmux = ("tmux", "-u", "-S", str(socket), "-f", "/dev/null")
        others = {name: value for name, value in lab.env.items() if name not in ("COLUMNS", "LINES")}
        self._env = {**others, "LC_ALL": "C.UTF-8"}
        command = f"{shlex.join([sys.executable, '-m', 'allranks', *words])}; exec sleep 600"
        place = ("-d", "-x", str(size[0]), "-y", str(size[1]), "-c", str(lab.folder))
        self._call("new-session", *place, command)

    @property
    def screen(self) -> list[str]:
        """The lines of its screen, without the empty ones at the bottom."""
        return self._call("capture-pane", "-p").rstrip("\n").split("\n")

    @property
    def history(self) -> str:
        """Its screen and what has left it at the top, as lines do when a terminal becomes narrow."""
        return self._call("capture-pane", "-p", "-S", "-")

    def type(self, *keys: str) -> None:
        """Press keys, by tmux's names of them."""
        self._call("send-keys", *keys)

    def resize(self, columns: int, lines: int) -> None:
        """Change its size, as a person does who drags its window."""
        self._call("resize-window", "-x", str(columns), "-y", str(lines))

    def close(self) -> None:
        """Take the terminal away."""
        self._call("kill-server")

    def _call(self, *words: str) -> str:
        return subprocess.run([*self._tmux, *words], env=self._env, capture_output=True, text=True, check=True).stdout
