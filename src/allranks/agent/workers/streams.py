"""A rank's standard streams: each line is in its file at once, and a flood of lines does not cost a call each.

A plain interpreter whose stdout is a file keeps 8 kB back. Here every line is flushed, so that it can be seen
while the rank runs and is there when the rank is killed. Thousands of lines a second are a flood: they are flushed
together, every few milliseconds, by a thread that lives for the flood.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable

_BUFFER = 1 << 16
#: At least _MANY lines within _WINDOW seconds are a flood, and are flushed every _INTERVAL seconds.
_WINDOW = 0.01
_MANY = 20
_INTERVAL = 0.02


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
        self._try(lambda: self.reconfigure(line_buffering=True))
        self._try(self.flush)
        self._flusher = None

    def _raw_end(self) -> int:
        return -1 if self._raw.closed else self._raw.tell()

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError:
            return False
        except ValueError:
            pass  # Closed by the script.
        return True
