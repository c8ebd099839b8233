"""Follow a run's logs until it ends, and show the last lines of those that there are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from allranks.runs.merge import MergedLogs, Sink

#: Seconds between two looks. With the index's ticks and the wait for equal lines a line takes about 0.1 s.
INTERVAL = 0.02


def follow(
    merged: MergedLogs,
    ended: Callable[[], bool],
    wait: Callable[[float], object],
    *,
    around: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """Write the ranks' lines as they come; return when the run has ended and all is written.

    Args:
        merged: the logs.
        ended: tells whether no rank writes any more.
        wait: waits so many seconds, or less when the run ends earlier.
        around: called with each step, which it must call: to wipe a progress bar before and draw it after.
    """
    step = around or _plainly
    while not ended():
        step(merged.pump)
        wait(INTERVAL)
    step(merged.finish)


def _plainly(action: Callable[[], None]) -> None:
    action()


class Tail:
    """Keeps the last lines of both sinks. Use it as the sinks of a ``MergedLogs``, then ``write`` it.

    Args:
        lines: how many lines to keep.
    """

    def __init__(self, lines: int) -> None:
        self._most = lines
        self._kept: deque[tuple[str, bytes]] = deque(maxlen=lines)
        self.out: Sink = _TailSink(self, "o")
        self.err: Sink = _TailSink(self, "e")

    def keep(self, kind: str, data: bytes) -> None:
        """Take whole lines of a kind."""
        if self._most:
            lines = data.rsplit(b"\n", self._most + 1)[-self._most - 1 : -1]
            self._kept.extend((kind, line) for line in lines)

    def write(self, out: Sink, err: Sink) -> None:
        """Write the kept lines, in their order, and forget them."""
        for kind, line in self._kept:
            (out if kind == "o" else err).write(line + b"\n")
        self._kept.clear()
        out.flush()
        err.flush()


class _TailSink:
    def __init__(self, tail: Tail, kind: str) -> None:
        self._tail = tail
        self._kind = kind

    def write(self, data: bytes, /) -> object:
        self._tail.keep(self._kind, data)
        return None

    def flush(self) -> object:
        return None
