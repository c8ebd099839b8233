"""How a run goes, in the lines that ``allranks run`` keeps below the log on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from allranks.cli import render
from allranks.runs.record import Run
from allranks.view.reader import Reader

if TYPE_CHECKING:
    from rich.text import Text

    from allranks.view.feed import Figures, Snapshot

#: Seconds that a run takes before they are shown: one that is shorter does not pay for what draws them.
_SECONDS = 1.0


class StatusLines:
    """Reads a run in a thread, since a file server may not answer for long, and returns lines for the terminal.

    ``metrics`` are those that are shown first.
    """

    def __init__(self, run: Run, metrics: Sequence[str] = ()) -> None:
        self._run, self._metrics = run, metrics or ("loss",)
        self._begins = time.monotonic() + _SECONDS
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

            self._shown, self._lines = wanted, [*map(_for_terminal, below_log(shot, columns, most, self._metrics))]
        return self._lines

    def _read(self) -> Snapshot:
        if self._figures is None:
            from allranks.view import watch  # noqa: F401 - here, as its libraries take a moment to be imported
            from allranks.view.feed import Figures

            self._figures = Figures(self._run)
        return self._figures.read()


def _for_terminal(line: Text) -> str:
    """Return a line with its colours, as the terminal takes them."""
    if not render.has_colour(sys.stderr):
        return line.plain
    from rich.console import Console

    console = Console(color_system="standard", force_terminal=True, highlight=False, emoji=False, markup=False)
    with console.capture() as captured:
        console.print(line, end="", soft_wrap=True)
    return captured.get()
