"""The full screen of ``allranks watch``: keys come in, a thread reads runs, and what has changed is drawn."""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, NoReturn

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from allranks.clusters.registry import load_kind
from allranks.runs.record import Run
from allranks.view.feed import Feed, Rows, RunsFeed, Snapshot
from allranks.view.reader import Reader
from allranks.view.selection import Choice, press, scrolled
from allranks.view.watch import run_screen, runs_screen

#: Seconds between two frames, if nothing happens in between.
_SECONDS = 1.0
#: Lines of the screen that are not of the log, about: PageUp and PageDown scroll by all others.
_FRAME = 12
#: A key: a control sequence, such as of an arrow, or a character.
_KEY = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)


class Screen:
    """The alternate screen of a terminal, which is as it was afterwards, however that ends."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, emoji=False, markup=False, soft_wrap=False)
        self._typed = ""
        self._kind = cache(load_kind)  # One object of each: it limits how often its cluster is queried.

    def __enter__(self) -> Screen:
        with ExitStack() as stack:
            stack.enter_context(_restored())
            reads, self._wakes = os.pipe()
            stack.callback(os.close, reads)  # The other end stays open: a thread may write to it until the end.
            os.set_blocking(self._wakes, False)
            self._woken = reads
            for number in (signal.SIGTERM, signal.SIGQUIT):
                stack.callback(signal.signal, number, signal.signal(number, _leave))
            stack.callback(signal.signal, signal.SIGWINCH, signal.signal(signal.SIGWINCH, lambda *_: self._wake()))
            live = Live(
                console=self._console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live = stack.enter_context(live)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stack.__exit__(kind, error, trace)
        except OSError as failure:
            _check_terminal(failure)
        if isinstance(error, OSError):
            _check_terminal(error)

    def watch(self, run: Run, *, several: bool = False) -> int:
        """Show a run until a key leaves it; return 0, or 1 if that leads back to the list."""
        feed, choice = Feed(run, self._kind(run.record.kind)), Choice(several=several)
        shot = Snapshot(run, time.time())
        reader = Reader(feed.read, self._wake)
        command: _Command | None = None
        try:
            while True:
                shot = reader.newest() or shot
                choice, command = _answered(choice, command)
                now = time.time()
                self._draw(run_screen(replace(shot, time=now, age=now - shot.time), choice, *self._console.size))
                for key in self._keys(0.2 if command else _SECONDS):
                    is_final = shot.run.record.status.state.is_final
                    choice, action = press(
                        choice,
                        key,
                        shot.run.record.world_size,
                        has_ended=is_final,
                        page=max(1, self._console.height - _FRAME),
                        lines=_length(shot, choice),
                    )
                    if action in ("quit", "back"):
                        return int(action == "back")
                    if action and command:
                        choice = replace(choice, note="the last command still runs: press the key again after it")
                    elif action:
                        command = _Command(action, shot.run)
                    feed.show_rank(choice.rank)
                    reader.hurry(choice.rank != shot.rank)
        finally:
            reader.stop()

    def watch_all(self, find: Callable[[], Sequence[Path]]) -> int:
        """Show several runs, and the one whose number is typed, until a key leaves them; return 0."""
        feed, top = RunsFeed(find, self._kind), 0
        feed.show(top, room := self._console.height - 2)
        reader = Reader(feed.read, self._wake)
        try:
            while True:
                shown = reader.newest() or Rows()
                self._draw(runs_screen(shown, *self._console.size))
                before = top, room
                for key in self._keys(_SECONDS):
                    if key == "q":
                        return 0
                    number = int(key) if key.isdecimal() else 0
                    if 0 < number <= len(shown.rows) and not self.watch(shown.rows[number - 1].run, several=True):
                        return 0
                    top = scrolled(top, key, room, max(0, shown.total - room))
                room = self._console.height - 2
                feed.show(top, room)
                reader.hurry((top, room) != before)
        finally:
            reader.stop()

    def _draw(self, lines: Sequence[Text]) -> None:
        self._live.update(Group(*lines), refresh=True)

    def _wake(self) -> None:
        with suppress(OSError):  # It is full, or closed: then nothing waits for it.
            os.write(self._wakes, b".")

    def _keys(self, seconds: float) -> list[str]:
        """Return the keys that were typed; none after so many seconds, or when there is something new to be shown."""
        ready, _, _ = select.select([0, self._woken], [], [], seconds)
        if self._woken in ready:
            os.read(self._woken, 4096)
        if 0 not in ready:
            return []
        if not (data := os.read(0, 4096)):
            raise OSError(errno.EIO, "the terminal is gone")
        return _KEY.findall(data.decode(errors="ignore"))


@contextmanager
def _restored() -> Iterator[None]:
    """Have the terminal pass each key on at once, and be as before afterwards. Ctrl-Z would leave it as it is: off."""
    before = termios.tcgetattr(0)
    try:
        tty.setcbreak(0, termios.TCSADRAIN)
        now = termios.tcgetattr(0)
        now[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(0, termios.TCSADRAIN, now)
        yield
    finally:
        with suppress(termios.error):  # The terminal is gone.
            termios.tcsetattr(0, termios.TCSADRAIN, before)


class _Command:
    """``allranks stacks`` or ``allranks cancel`` on a run, as a process of its own, which may outlive this one."""

    def __init__(self, verb: str, run: Run) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is read
        self._process = subprocess.Popen(
            [sys.executable, "-m", "allranks", verb, str(run.folder)],
            cwd="/",  # Not where the user is, who may have a module of our name there.
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def answer(self) -> list[str] | None:
        """Return the lines that it has printed; None while it runs."""
        if self._process.poll() is None:
            return None
        with self._output as output:
            output.seek(0)
            return output.read().decode(errors="replace").splitlines()


def _answered(choice: Choice, command: _Command | None) -> tuple[Choice, _Command | None]:
    """Show the answer of a command that has ended: one line at the bottom, more of them on the whole screen."""
    if command is None or (answer := command.answer()) is None:
        return choice, command
    if len(answer) > 1:
        return replace(choice, pane="answer", answer=answer, note="", top=0), None
    return replace(choice, note=" ".join(answer)), None


def _length(shot: Snapshot, choice: Choice) -> int:
    """Return how many lines there are of what has the whole screen."""
    lines = {"log": shot.lines or (), "nodes": shot.nodes, "events": shot.events, "answer": choice.answer}
    return len(lines.get(choice.pane, ()))


def _leave(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _check_terminal(error: OSError) -> None:
    """Exit as SIGHUP would have it if the terminal is gone; it cannot be restored, and nobody sees an error."""
    if error.errno == errno.EIO:
        raise SystemExit(128 + signal.SIGHUP)
