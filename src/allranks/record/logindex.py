"""When bytes arrived in a node's logs: ``<unix time in ms> <rank> <o|e> <end offset>`` for each file that grew.

Ranks write directly to their files, so that no rank waits for a reader and no output is lost when launcher or agent
die. Log files hold no times, so the agent records their sizes about every 50 ms, and the launcher merges by these.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from allranks import contract

#: Name of a stream in an index, and suffix of its log file.
KINDS = {"o": "out", "e": "err"}
#: Bytes of an index to read at once.
_BLOCK = 1 << 18


class LogIndexWriter:
    """Records the growth of one node's logs in its index, of which it must be the only writer.

    A full or missing disk does not stop it: a later tick records the missing growth.
    """

    def __init__(self, folder: Path, mode: int = 0o600, *, clock: Callable[[], float] = time.time) -> None:
        self.growths = 0
        self._folder = folder
        self._mode = mode
        self._clock = clock
        self._files: dict[str, str] = {}  # Path of a log -> its name in the index.
        self._noted: dict[str, int] = {}  # Path of a log -> the size recorded last.
        self._descriptor: int | None = None
        self._is_torn = False

    def watch(self, ranks: Iterable[int]) -> None:
        """Record the growth of these ranks' logs too, whether or not they exist yet."""
        for rank in sorted(ranks):
            for kind, stream in KINDS.items():
                self._files[os.fspath(self._folder / contract.rank_log(rank, stream))] = f"{rank} {kind}"

    def tick(self) -> None:
        """Record every file whose size has changed. A full disk is not an error."""
        grown = {}
        for path in self._files:
            try:
                # Half the cost of Path.stat, and called hundreds of times per second.
                size = os.stat(path).st_size  # noqa: PTH116
            except OSError:
                continue
            if size != self._noted.get(path, 0):
                grown[path] = size
        if not grown:
            return
        now = int(self._clock() * 1000)
        text = "".join(f"{now} {self._files[path]} {size}\n" for path, size in grown.items())
        try:
            self._write(text.encode())
        except OSError:
            return
        self.growths += len(grown)
        self._noted |= grown

    def close(self) -> None:
        """Record once more and close the index. May be called twice."""
        self.tick()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._files = {}

    def _write(self, data: bytes) -> None:
        path = self._folder / contract.LOG_INDEX
        if self._descriptor is None:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, self._mode)
            size = os.fstat(self._descriptor).st_size
            self._is_torn = bool(size) and os.pread(self._descriptor, 1, size - 1) != b"\n"
        # A line that a full disk cut off may look complete: make it invalid.
        data = b"?\n" + data if self._is_torn else data
        written = os.write(self._descriptor, data)
        if written:
            self._is_torn = written < len(data)
        if written < len(data):
            raise OSError(errno.ENOSPC, "No space left on device", os.fspath(path))


class Growth(NamedTuple):
    """A log file was seen to end at ``end`` bytes.

    ``restarted``: it was longer before, so it was truncated and is read from the beginning.
    """

    time: int
    node: int
    rank: int
    kind: str
    end: int
    restarted: bool = False


class LogIndexReader:
    """Reads the index of one node incrementally."""

    def __init__(self, folder: Path, node: int) -> None:
        self._path = folder / contract.LOG_INDEX
        self._node = node
        self._offset = 0
        self._time = 0
        self._ends: dict[tuple[int, str], int] = {}

    def read(self) -> Iterator[Growth]:
        """Yield new entries; skip corrupt and incomplete lines."""
        while True:
            block = self._read_block()
            end = block.rfind(b"\n") + 1
            # A line longer than a block is corrupt: skip it, or the reader would never get past it.
            self._offset += end if end or len(block) < _BLOCK else len(block)
            batch: list[Growth] = []
            for line in block[:end].splitlines():
                growth = self._parse(line)
                if growth is None:
                    continue
                if growth.restarted:
                    # The file was truncated: earlier entries refer to bytes that are gone.
                    batch = [old for old in batch if (old.rank, old.kind) != (growth.rank, growth.kind)]
                batch.append(growth)
            yield from batch
            if len(block) < _BLOCK:
                return

    def _read_block(self) -> bytes:
        with contextlib.suppress(OSError):
            if self._path.stat().st_size > self._offset:
                with self._path.open("rb", buffering=0) as stream:
                    stream.seek(self._offset)
                    return stream.read(_BLOCK)
        return b""

    def _parse(self, line: bytes) -> Growth | None:
        try:
            time_ms, rank, kind, end = line.decode("ascii").split(" ")
            key, size, now = (int(rank), kind), int(end), int(time_ms)
        except ValueError:
            return None
        if kind not in KINDS or size < 0:
            return None
        # A clock that was set back must not reverse the order of a node's lines.
        self._time = max(self._time, now)
        restarted = size < self._ends.get(key, 0)
        self._ends[key] = size
        return Growth(self._time, self._node, key[0], kind, size, restarted)
