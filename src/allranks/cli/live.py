"""Ranks' output on a terminal or in a pipe, with the newest progress bar or a spinner on a terminal's last line."""

from __future__ import annotations

import errno
import math
import os
import re
import select
import shutil
import sys
import time
from collections.abc import Callable

from allranks import contract
from allranks.cli import render
from allranks.errors import AllranksError
from allranks.runs.follow import Tail
from allranks.runs.lineform import LineForm
from allranks.runs.merge import MergedLogs
from allranks.runs.record import Run

#: Colours and cursor moves (ECMA-48 control sequences): a bar is cut to the terminal's width without them.
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
#: Its frames, ten a second.
_SPINNER = r"-\|/"
#: Where the cursor cannot move, an unfinished line is shown as a prompt after so long.
_PROMPT_SECONDS = 0.3


class Outlet:
    """A file descriptor that takes all that it is given, until nobody is at its other end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_terminal = os.isatty(descriptor)
        #: Why nothing more can be written, once that is so.
        self.failure: OSError | None = None

    def write(self, text: bytes, /) -> int:
        """Write all of ``text``; drop it when the reader is gone. A terminal gets nothing to obey but colours."""
        rest = memoryview(_harmless(text) if self._is_terminal else text)
        while rest and not self.failure:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.failure = error  # A closed pipe, a terminal that is gone, a full disk.
        return len(text)


class Live:
    """Two sinks for merged logs, and a progress bar below what goes through them.

    Args:
        form: which lines are shown, and how; all that is JSON goes to stdout. None, as of a run that is followed: all
            lines, and on a terminal tracebacks without the frames of other people's code.
        keeps_stdout: whether all lines go to stderr, because stdout is for something else.
        keyboard: the rank that reads the terminal, if one does: its prompts are shown.
    """

    def __init__(
        self, form: LineForm | None = None, *, keeps_stdout: bool = False, keyboard: int | None = None
    ) -> None:
        self._keyboard = keyboard
        self._form = form or LineForm(fold_frames=sys.stderr.isatty())
        self._lively = render.is_lively(sys.stderr)
        self._outlets = (Outlet(1), Outlet(2))
        out, err = (_WipingSink(outlet, self.wipe) for outlet in self._outlets)
        self._sinks = (err if keeps_stdout else out, out if self._form.as_json else err)
        self._tail: Tail | None = None
        self._drawn = self._waiting = b""
        self._since = 0.0
        self._told = False
        self._awaited_since = math.inf

    def merge(
        self,
        run: Run,
        *,
        ranks: set[int] | None = None,
        nodes: set[int] | None = None,
        tail: int | None = None,
        attempt: int | None = None,
    ) -> MergedLogs:
        """Merge the logs of a run's attempt, the newest by default, into our stdout and stderr.

        With ``tail``, the last lines of what there is come first.
        """
        record = run.record
        self._tail = None if tail is None else Tail(tail)
        out, err = (self._tail.out, self._tail.err) if self._tail else self._sinks
        colour = render.has_colour(sys.stdout) and render.has_colour(sys.stderr)
        return MergedLogs(
            run.attempt_folder if attempt is None else run.folder / contract.attempt_dir(attempt),
            out,
            err,
            ranks=ranks,
            nodes=nodes,
            colour=colour,
            nnodes=record.nnodes,
            world_size=record.world_size,
            form=self._form,
            keyboard=self._keyboard,
        )

    def step(self, merged: MergedLogs, action: Callable[[], None], awaited: str = "") -> None:
        """Take one step of following, then draw the bar of the rank that has one, or else what is waited for."""
        action()
        self.draw(merged, awaited)
        if (failure := self._outlets[0].failure) and not self._told:
            self._told = True
            what = "nobody reads stdout any more" if failure.errno == errno.EPIPE else f"stdout: {failure.strerror}"
            render.talk(f"allranks: {what}; the run goes on, its logs are in its folder")

    def check(self) -> None:
        """Make sure that what was shown has arrived.

        Raises:
            BrokenPipeError: nobody reads stdout any more.
            AllranksError: it cannot be written: the disk behind it is full, say.
        """
        if _is_reader_gone(1):
            raise BrokenPipeError
        if failure := self._outlets[0].failure:
            if isinstance(failure, BrokenPipeError):
                raise failure
            raise AllranksError("cannot write to stdout", why=failure.strerror)

    def end_tail(self, merged: MergedLogs) -> None:
        """Write the last lines of what there is; from now on every line is written."""
        if self._tail:
            self._tail.write(*self._sinks)
            merged.out, merged.err = self._sinks

    def wipe(self) -> None:
        """Wipe the bar."""
        if self._drawn:
            self._drawn = b""
            if self._lively:
                _to_terminal(b"\r\x1b[K")

    def show(self, text: str) -> None:
        """Show a text in place of whatever stands on a terminal's last line."""
        if self._lively:
            _to_terminal(b"\r\x1b[K")
            self._draw(text.encode())

    def draw(self, merged: MergedLogs, awaited: str = "") -> None:
        """Draw the prompt or the bar of the rank that has one, where there is a terminal; else what is waited for."""
        prompt = merged.prompt() or b""
        if self._lively:
            self._draw(prompt or merged.transient() or self._spinner(awaited))
        elif prompt != self._waiting:
            self._waiting, self._since = prompt, time.monotonic()
        elif prompt != self._drawn and time.monotonic() - self._since > _PROMPT_SECONDS:
            self._drawn = prompt  # It cannot be wiped, so the first half of a line must not be taken for a prompt.
            self._outlets[0 if sys.stdout.isatty() else 1].write(prompt)

    def _spinner(self, awaited: str) -> bytes:
        if not awaited:
            self._awaited_since = math.inf
            return b""
        now = time.monotonic()
        self._awaited_since = min(now, self._awaited_since)
        frame = _SPINNER[int(now * 10) % len(_SPINNER)]
        return f"{frame} {awaited} ({int(now - self._awaited_since)} s)".encode()

    def _draw(self, text: bytes) -> None:
        plain = _ESCAPE.sub("", text.decode(errors="replace"))
        shown = render.printable(plain)[: shutil.get_terminal_size().columns - 1].encode()
        if shown == self._drawn:
            return
        self.wipe()
        if shown:
            _to_terminal(shown)
        self._drawn = shown


def _is_reader_gone(descriptor: int) -> bool:
    """Tell whether nobody is at the other end of a pipe any more, without writing to it."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class _WipingSink:
    """Passes lines on, and wipes the bar before them."""

    def __init__(self, outlet: Outlet, wipe: Callable[[], None]) -> None:
        self._outlet = outlet
        self._wipe = wipe

    def write(self, text: bytes, /) -> int:
        self._wipe()
        return self._outlet.write(text)

    def flush(self) -> None:
        """Do nothing: all has been written."""


def _harmless(text: bytes) -> bytes:
    return render.harmless(text.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def _to_terminal(text: bytes) -> None:
    try:
        os.write(2, text)
    except OSError:
        pass  # The terminal is gone; the signal that comes with it ends the run.
