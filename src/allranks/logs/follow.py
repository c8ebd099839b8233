"""Follow a run's logs until it ends, and keep the last lines of logs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from allranks.logs.merge import MergedLogs, Sink

#: Seconds between two polls. With the index's ticks and the wait for equal lines a line takes about 0.1 s.
INTERVAL = 0.02


def follow(
    merged: MergedLogs,
    ended: Callable[[], bool],
    wait: Callable[[float], object],
    *,
    around: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """Write the ranks' lines as they come; return when the run has ended and all is written.

    ``wait`` may return earlier when the run ends; ``around`` calls each step that it is given, and draws a bar, say.
    """
    step = around or (lambda action: action())
    while not ended():
        step(merged.pump)
        wait(INTERVAL)
    step(merged.finish)


class Tail:
    """Keeps the last lines of both sinks. Use it as the sinks of a ``MergedLogs``, then ``write`` it."""

    def __init__(self, lines: int) -> None:
        self._kept: deque[tuple[bool, bytes]] = deque(maxlen=lines)
        self.out: Sink = _TailSink(self._kept, lines, is_out=True)
        self.err: Sink = _TailSink(self._kept, lines, is_out=False)

    def write(self, out: Sink, err: Sink) -> None:
        """Write the kept lines, in their order, and forget them."""
        for is_out, line in self._kept:
            (out if is_out else err).write(line + b"\n")
        self._kept.clear()
        out.flush()
        err.flush()


class _TailSink:
    def __init__(self, kept: deque[tuple[bool, bytes]], most: int, *, is_out: bool) -> None:
        self._kept, self._most, self._is_out = kept, most, is_out

    def write(self, data: bytes, /) -> None:
        if self._most:
            lines = data.rsplit(b"\n", self._most + 1)[-self._most - 1 : -1]
            self._kept.extend((self._is_out, line) for line in lines)

    def flush(self) -> None:
        """Do nothing: ``Tail.write`` shows what is kept."""
