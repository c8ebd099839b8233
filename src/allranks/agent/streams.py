"""A rank's standard streams: each line is in its file at once, and a flood of lines does not cost a call each.

A plain interpreter whose stdout is a file keeps 8 kB back. Here every line is flushed, so that it can be seen
while the rank runs and is there when the rank is killed. Where lines come by the thousand a second nobody reads
them one by one: they are then flushed together, every few milliseconds, by a thread that lives for the flood.
"""

from __future__ import annotations

import io
import os
import threading
import time

_BUFFER = 1 << 16
#: At least _MANY lines within _WINDOW seconds are a flood, and are flushed every _INTERVAL seconds.
_WINDOW = 0.01
_MANY = 20
_INTERVAL = 0.02


class FloodBuffer(io.BufferedWriter):
    """Flushes at once, except in a flood."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw, _BUFFER)
        self._window_ends = 0.0
        self._flushes = 0
        self._more = False
        self._flusher: threading.Thread | None = None
        os.register_at_fork(before=self.flush_now, after_in_child=self._forget_flusher)

    def flush(self) -> None:
        """Flush, or in a flood leave it to the flusher; the text layer calls this after each line."""
        if self._flusher:
            self._more = True
            return
        self._flushes += 1
        if self._flushes < _MANY or not self._is_flood() or not self._start_flusher():
            super().flush()

    def flush_now(self) -> None:
        """Flush whatever there is."""
        if not self.closed:
            super().flush()

    def close(self) -> None:
        """Flush and close."""
        self.flush_now()
        super().close()

    def _is_flood(self) -> bool:
        now = time.monotonic()
        if now < self._window_ends:
            return True
        self._window_ends = now + _WINDOW
        self._flushes = 0
        return False

    def _start_flusher(self) -> bool:
        if not threading.main_thread().is_alive():
            return False  # The interpreter is ending: it would not wait for a new thread.
        flusher = threading.Thread(target=self._flush_until_calm, name="allranks-flush")
        self._more, self._flusher = True, flusher
        flusher.start()
        return True

    def _flush_until_calm(self) -> None:
        while self._more:
            self._more = False
            time.sleep(_INTERVAL)
            self._flush_if_open()
        # In this order: a line that comes in between finds no flusher and is flushed by itself.
        self._flusher = None
        self._flush_if_open()

    def _flush_if_open(self) -> None:
        try:
            super().flush()
        except (ValueError, OSError):
            pass  # Closed by the script; or a full disk, which the script's own next line runs into.

    def _forget_flusher(self) -> None:
        self._flusher = None


class RankStream(io.TextIOWrapper):
    """Text over a FloodBuffer. A flush that the script asks for is done at once, flood or not."""

    def flush(self) -> None:
        """Flush to the file."""
        super().flush()
        flush_now = getattr(self.buffer, "flush_now", None)
        if flush_now:
            flush_now()
