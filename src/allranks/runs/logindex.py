"""When bytes arrived in the logs of a node: written by its agent, read by whoever merges the logs.

Ranks write straight into their files, so that no rank ever waits for a reader and nothing is lost when
launcher or agent die. The price is that a log file holds no times. The agent looks at the sizes about every
50 ms and notes, one line for each file that grew::

    <unix time in ms> <rank> <o|e> <end offset>

This runs on the node: the standard library only.
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

#: How an index names a stream, and the ending of its log file.
KINDS = {"o": "out", "e": "err"}
#: How much of an index is read at once.
_BLOCK = 1 << 18


class _Watched:
    """A log file and the size that the index last told of."""

    __slots__ = ("label", "path", "told")

    def __init__(self, folder: Path, rank: int, kind: str) -> None:
        self.path = os.fspath(folder / contract.rank_log(rank, KINDS[kind]))
        self.label = f"{rank} {kind}"
        self.told = 0


class LogIndexWriter:
    """Notes when the logs of one node grow. The only writer of that node's index.

    A disk that is full or gone does not stop it: ``error`` holds the failure until a later tick succeeds, and
    what could not be noted is noted then.

    Args:
        folder: the node's folder in the attempt.
        mode: permissions of the index.
        clock: gives the time in seconds since 1970.
    """

    def __init__(self, folder: Path, mode: int = 0o600, *, clock: Callable[[], float] = time.time) -> None:
        self.error: OSError | None = None
        self._folder = folder
        self._mode = mode
        self._clock = clock
        self._files: list[_Watched] = []
        self._ranks: set[int] = set()
        self._descriptor: int | None = None
        self._torn = False

    def watch(self, ranks: Iterable[int]) -> None:
        """Look at the logs of these ranks too, whether or not they exist yet."""
        for rank in sorted(set(ranks) - self._ranks):
            self._ranks.add(rank)
            self._files += [_Watched(self._folder, rank, kind) for kind in KINDS]

    def tick(self) -> None:
        """Note every file whose size changed since it was last noted. Raises nothing for a full disk."""
        grown = self._grown()
        if not grown:
            return
        now = int(self._clock() * 1000)
        text = "".join(f"{now} {file.label} {size}\n" for file, size in grown)
        try:
            self._write(text.encode())
        except OSError as error:
            self.error = error
            return
        self.error = None
        for file, size in grown:
            file.told = size

    def close(self) -> None:
        """Do a last tick and close the index. May be called twice."""
        self.tick()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._files = []

    def _grown(self) -> list[tuple[_Watched, int]]:
        grown = []
        for file in self._files:
            try:
                # Half the cost of Path.stat, hundreds of times a second.
                size = os.stat(file.path).st_size  # noqa: PTH116
            except OSError:
                continue
            if size != file.told:
                grown.append((file, size))
        return grown

    def _write(self, data: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = self._open()
        # What a full disk cut off could read as another number: make it damaged for certain.
        data = b"?\n" + data if self._torn else data
        written = os.write(self._descriptor, data)
        self._torn = written < len(data) if written else self._torn
        if written < len(data):
            raise OSError(errno.ENOSPC, "No space left on device", os.fspath(self._folder / contract.LOG_INDEX))

    def _open(self) -> int:
        path = self._folder / contract.LOG_INDEX
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, self._mode)
        size = os.fstat(descriptor).st_size
        self._torn = bool(size) and os.pread(descriptor, 1, size - 1) != b"\n"
        return descriptor


class Growth(NamedTuple):
    """A log file was seen to end at ``end`` bytes.

    ``restarted`` means that it was longer before: it was cut short and is read from its beginning.
    """

    time: int
    node: int
    rank: int
    kind: str
    end: int
    restarted: bool = False


class LogIndexReader:
    """Reads the index of one node bit by bit while it grows."""

    def __init__(self, folder: Path, node: int) -> None:
        self._path = folder / contract.LOG_INDEX
        self._node = node
        self._offset = 0
        self._time = 0
        self._ends: dict[tuple[int, str], int] = {}

    def read(self) -> Iterator[Growth]:
        """Yield what was noted since the last call; lines that are damaged or cut off are skipped."""
        while True:
            batch, more = self._batch()
            yield from batch
            if not more:
                return

    def _batch(self) -> tuple[list[Growth], bool]:
        block = self._block()
        whole = block.rfind(b"\n") + 1
        # An endless line is damage; step over it, else nothing after it is ever seen.
        self._offset += whole if whole or len(block) < _BLOCK else len(block)
        batch: list[Growth] = []
        for line in block[:whole].splitlines():
            growth = self._parse(line)
            if growth is None:
                continue
            if growth.restarted:
                # What the earlier notes told of is no longer in the file: reading it would give other bytes.
                batch = [old for old in batch if (old.rank, old.kind) != (growth.rank, growth.kind)]
            batch.append(growth)
        return batch, len(block) == _BLOCK

    def _block(self) -> bytes:
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
        # A clock that was set back must not turn the order of a node's lines around.
        self._time = max(self._time, now)
        restarted = size < self._ends.get(key, 0)
        self._ends[key] = size
        return Growth(self._time, self._node, key[0], kind, size, restarted)
