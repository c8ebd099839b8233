"""Shows ranks' output, and below it on a terminal the newest progress bar or a spinner, and how the run goes."""

from __future__ import annotations

import errno
import math
import os
import re
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

from allranks import contract
from allranks.cli import render
from allranks.job.problems import printable
from allranks.logs.lineform import LineForm
from allranks.logs.merge import MergedLogs, Tail
from allranks.runs.record import Run
from allranks.view.reader import Reader

if TYPE_CHECKING:
    from rich.text import Text

    from allranks.clusters.base import Started
    from allranks.runs.agents import HappenedInJobs
    from allranks.view.feed import Figures, Snapshot

#: Colours and cursor moves (ECMA-48 control sequences): a bar is cut to the terminal's width without them.
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
#: Its frames, ten a second.
_SPINNER = r"-\|/"
#: Lines below the log at most, and the part of a terminal's rows that they may take.
_MOST_LINES, _PART = 3, 4
#: Where the cursor cannot move, an unfinished line is shown as a prompt after so long.
_PROMPT_SECONDS = 0.3
#: Seconds by which news are held back, so that lines that a rank wrote before its end are shown first.
AFTER_LINES = 0.2
#: Seconds after which a wait is reported where no spinner shows it: importing torch on a slow disk takes that long.
_LONG_WAIT = 30.0
#: Seconds that a run takes before its status is shown: one that is shorter does not pay for what draws it.
_STATUS_SECONDS = 1.0


class Outlet:
    """A file descriptor that takes all that it is given, until its reader is gone.

    Args:
        descriptor: to write to.
        below: returns the lines that are drawn again below what is written.
    """

    def __init__(self, descriptor: int, below: Callable[[], Sequence[str]]) -> None:
        self._descriptor = descriptor
        self._below = below
        self._is_terminal = os.isatty(descriptor)
        #: Why nothing more can be written; None if it can.
        self.failure: OSError | None = None

    def write(self, text: bytes) -> None:
        """Write all of ``text``; drop it when the reader is gone. A terminal gets no control sequences but colours."""
        lines = self._below() if text.endswith(b"\n") else ()
        if self._is_terminal:
            text = render.harmless(text.decode(errors="surrogateescape")).encode(errors="surrogateescape")
            text = render.BELOW.wiped() + text + render.BELOW.drawn(lines)
        rest = memoryview(text)
        while rest and not self.failure:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.failure = error  # A closed pipe, a terminal that is gone, a full disk.


class Live:
    """Two sinks for merged logs, and on a terminal a few lines below what goes through them.

    A pipe on stdout may end in the same terminal, as that of ``tee``: then nothing is drawn.

    Args:
        form: which lines are shown, and how; JSON goes to stdout. Default: all lines, and on a terminal tracebacks
            without the frames of other people's code.
        keeps_stdout: whether all lines go to stderr, because stdout is for something else.
        keyboard: the rank that reads the terminal, whose prompts are shown; None if there is none.
        plain: whether a terminal is treated as one that cannot move its cursor: nothing is drawn below the log.

    Attributes:
        is_lively: whether something is drawn below the log.
        status: returns what a terminal shows below the log, in so many columns and lines at most.
    """

    def __init__(
        self,
        form: LineForm | None = None,
        *,
        keeps_stdout: bool = False,
        keyboard: int | None = None,
        plain: bool = False,
    ) -> None:
        self.status: Callable[[int, int], list[str]] = lambda columns, most: []
        self._keyboard = keyboard
        self._form = form or LineForm(fold_frames=sys.stderr.isatty())
        self.is_lively = render.is_lively(sys.stderr) and not plain and (keeps_stdout or not _is_pipe(1))
        for number in (signal.SIGTSTP, signal.SIGQUIT) if self.is_lively else ():
            if signal.getsignal(number) is signal.SIG_DFL:  # In the background a shell has SIGQUIT ignored.
                signal.signal(number, _leave)
        self._out, self._err = Outlet(1, self._after), Outlet(2, self._after)
        out, err = self._out.write, self._err.write
        self._sinks = (err if keeps_stdout else out, out if self._form.as_json else err)
        self._tail: Tail | None = None
        self._prompt = self._waiting = b""
        self._since = 0.0
        self._has_reported_failure = False
        self._awaited_since = math.inf

    def merge(
        self,
        run: Run,
        attempt: int,
        *,
        ranks: set[int] | None = None,
        nodes: set[int] | None = None,
        tail: int | None = None,
    ) -> MergedLogs:
        """Merge the logs of a run's attempt into our stdout and stderr; with ``tail``, only the last lines so far."""
        self._tail = None if tail is None else Tail(tail)
        out, err = (self._tail.out, self._tail.err) if self._tail else self._sinks
        colour = render.has_colour(sys.stdout) and render.has_colour(sys.stderr)
        return MergedLogs(
            run.folder / contract.attempt_dir(attempt),
            out,
            err,
            ranks=ranks,
            nodes=nodes,
            colour=colour,
            nnodes=run.record.nnodes,
            world_size=run.record.world_size,
            form=self._form,
            keyboard=self._keyboard,
        )

    def step(self, merged: MergedLogs, action: Callable[[], None], awaited: str = "") -> None:
        """Take one step of following, then draw the bar of the rank that has one, or else what is waited for."""
        action()
        self.draw(merged, awaited)
        if (failure := self._out.failure) and not self._has_reported_failure:
            self._has_reported_failure = True
            what = "the reader of stdout is gone" if failure.errno == errno.EPIPE else f"stdout: {failure.strerror}"
            render.talk(f"allranks: {what}; the run continues, its logs are in its directory")

    def check(self) -> None:
        """Raise BrokenPipeError if the reader of stdout is gone, and AllranksError if stdout cannot be written."""
        poll = select.poll()
        poll.register(1, 0)  # Without a write: POLLERR is reported of a pipe without a reader.
        failure = self._out.failure
        if isinstance(failure, BrokenPipeError) or any(event & select.POLLERR for _, event in poll.poll(0)):
            raise BrokenPipeError
        if failure:
            raise render.unwritable_stdout(failure)

    def end_tail(self, merged: MergedLogs) -> None:
        """Write the last lines that are there; from now on every line is written."""
        if self._tail:
            self._tail.write(*self._sinks)
            merged.out, merged.err = self._sinks

    def wipe(self) -> None:
        """Wipe what is drawn."""
        self._prompt = b""
        _to_terminal(render.BELOW.wiped())

    def show(self, text: str) -> None:
        """Show a text on a terminal's last line."""
        if self.is_lively:
            _to_terminal(render.BELOW.wiped() or b"\r\x1b[K")
            _to_terminal(render.BELOW.drawn([_fitting(text.encode())], above=False))

    def draw(self, merged: MergedLogs, awaited: str = "") -> None:
        """Draw the prompt of a rank, behind which a person types; or its bar or what is waited for, and the status."""
        prompt = merged.prompt() or b""
        if self.is_lively:
            self._prompt = prompt
            first = prompt or merged.transient() or self._spinner(awaited)
            lines, status = [_fitting(first)] if first else [], list[str]()
            if not prompt and _is_foreground():  # In the background others type below the log.
                columns, rows = render.BELOW.size
                status = self.status(columns - 1, max(1, min(_MOST_LINES, rows // _PART)) - len(lines))
            if (lines := lines + status) != render.BELOW.lines:
                _to_terminal(render.BELOW.drawn(lines, above=bool(status)))
        elif prompt != self._waiting:
            self._waiting, self._since = prompt, time.monotonic()
        elif prompt != self._prompt and time.monotonic() - self._since > _PROMPT_SECONDS:
            # It cannot be wiped, so the first half of a line must not be taken for a prompt.
            (self._out if sys.stdout.isatty() else self._err).write(prompt)
            self._prompt = prompt

    def _after(self) -> Sequence[str]:
        """Return what is drawn again below a line of the log. Before one stands a prompt, with what was typed there."""
        lines = () if self._prompt else render.BELOW.lines
        self._prompt = b""
        return lines

    def _spinner(self, awaited: str) -> bytes:
        if not awaited:
            self._awaited_since = math.inf
            return b""
        now = time.monotonic()
        self._awaited_since = min(now, self._awaited_since)
        frame = _SPINNER[int(now * 10) % len(_SPINNER)]
        return f"{frame} {awaited} ({int(now - self._awaited_since)} s)".encode()


class StatusLines:
    """How a run goes, in lines for :attr:`Live.status`; it is read in a thread, since a file server may not answer.

    ``metrics`` are those that are shown first.
    """

    def __init__(self, run: Run, metrics: Sequence[str] = ()) -> None:
        self._run, self._metrics = run, metrics or ("loss",)
        self._begins = time.monotonic() + _STATUS_SECONDS
        self._reader: Reader[Snapshot] | None = None
        self._figures: Figures | None = None
        self._shown: tuple[Snapshot, int, int] | None = None
        self._lines: list[str] = []

    def __call__(self, columns: int, most: int) -> list[str]:
        """Return so many lines at most, of so many cells at most."""
        if self._reader is None:
            if time.monotonic() >= self._begins:
                self._reader = Reader(self._read)
            return []
        try:
            shot = self._reader.newest()
        except Exception as error:  # noqa: BLE001 - what only shows a run must not end it
            render.talk(f"allranks: note: the lines below the log have ended: {type(error).__name__}: {error}")
            self._begins, self._reader = float("inf"), None
            return []
        if shot and self._shown != (wanted := (shot, columns, most)):
            from allranks.view.watch import below_log

            self._shown, self._lines = wanted, [*map(_coloured, below_log(shot, columns, most, self._metrics))]
        return self._lines

    def _read(self) -> Snapshot:
        if self._figures is None:
            from allranks.view import watch  # noqa: F401 - here, as its libraries take a moment to be imported
            from allranks.view.feed import Figures

            self._figures = Figures(self._run)
        return self._figures.read()


class News:
    """Shows what happens to a run beside its log: restarts, lost nodes, hangs, and what is waited for long."""

    def __init__(self, happened: Started | HappenedInJobs, run: Run, live: Live) -> None:
        self._happened, self._run, self._live = happened, run, live
        self._held: list[tuple[float, str]] = []
        self._wait_is_long_at: float | None = None

    def report(self, hold: float = 0.0) -> None:
        """Show the news that are older than ``hold`` seconds."""
        now = time.monotonic()
        self._held += [(now, line) for line in self._happened.news()]
        while self._held and self._held[0][0] + hold <= now:
            self._say(self._held.pop(0)[1])
        awaited = self._happened.awaited  # Reported once, if that takes long and no spinner shows it.
        if not awaited:
            self._wait_is_long_at = None
        elif self._wait_is_long_at is None:
            self._wait_is_long_at = now + _LONG_WAIT
        elif now >= self._wait_is_long_at and not self._live.is_lively:
            self._wait_is_long_at = math.inf
            self._say(f"still {awaited}")

    def _say(self, line: str) -> None:
        self._live.wipe()
        render.talk(f"allranks: {self._run.record.id}: {render.one_line(line)}")


def _coloured(line: Text) -> str:
    """Return a line with its colours, as the terminal takes them."""
    if not render.has_colour(sys.stderr):
        return line.plain
    from rich.console import Console

    console = Console(color_system="standard", force_terminal=True, highlight=False, emoji=False, markup=False)
    with console.capture() as captured:
        console.print(line, end="", soft_wrap=True)
    return captured.get()


def _leave(number: int, _: FrameType | None) -> None:
    """Stop (SIGTSTP) or end (SIGQUIT) as the signal has it, with nothing drawn above the shell that follows."""
    _to_terminal(render.BELOW.wiped())
    if number == signal.SIGTSTP:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _fitting(text: bytes) -> str:
    """Return a text as one line of the terminal, without colours."""
    line, width = printable(_ESCAPE.sub("", text.decode(errors="replace"))), render.BELOW.size.columns - 1
    if line.isascii():
        return line[:width]
    from rich.cells import cell_len, set_cell_size  # A wide character takes two cells, a combining one none.

    return line if cell_len(line) <= width else set_cell_size(line, width)


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False  # It is closed.


def _is_foreground() -> bool:
    """Return whether this command has the terminal."""
    try:
        return os.tcgetpgrp(2) == os.getpgrp()
    except OSError:
        return True  # It is no controlling terminal: there are no jobs in the background.


def _to_terminal(text: bytes) -> None:
    with suppress(OSError):  # The terminal is gone; the signal that comes with it ends the run.
        os.write(2, text)
