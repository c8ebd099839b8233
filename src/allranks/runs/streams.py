"""The log files of an attempt: found as they appear, read by what the nodes' indexes tell."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from allranks import contract
from allranks.runs.frames import Frames
from allranks.runs.lines import LineCutter
from allranks.runs.logindex import KINDS, Growth, LogIndexReader
from allranks.runs.pending import Source

_NODE = re.compile(r"node-(\d+)")
_LOG = re.compile(r"(?:rank-(\d+)|node)\.(out|err)")
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


class LogStream:
    """One rank's stdout or stderr, or those of a node's ranks in one file, and how far it has been read.

    The file is opened for each read: thousands of ranks need no thousands of open files.
    """

    def __init__(self, path: Path, source: Source, kind: str) -> None:
        self.source = source
        self.kind = kind
        self.at = 0
        self.cutter = LineCutter()
        self.frames = Frames()
        self._path = os.fspath(path)

    def size(self) -> int:
        """Give the size of the file; 0 if it is gone."""
        with contextlib.suppress(OSError):
            return os.stat(self._path).st_size  # noqa: PTH116
        return 0

    def read(self, end: int, most: int) -> bytes:
        """Read on towards ``end``, at most so many bytes; nothing while the file is shorter than that."""
        length = min(end - self.at, most)
        if length <= 0:
            return b""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, _READ_FLAGS)
            try:
                # Shorter than was noted: it was cut since, or a shared filesystem shows an old state.
                if os.fstat(descriptor).st_size < end:
                    return b""
                data = os.pread(descriptor, length, self.at)
            finally:
                os.close(descriptor)
            self.at += len(data)
            return data
        return b""

    def restart(self) -> bytes:
        """Begin at the start of the file, which was cut short; return what was unfinished before."""
        self.at = 0
        return self.cutter.end()


class AttemptLogs:
    """All log files of an attempt that are asked for.

    Args:
        folder: the attempt's folder.
        ranks: global ranks to read; None for all.
        nodes: nodes to read; None for all.
    """

    def __init__(self, folder: Path, ranks: Collection[int] | None, nodes: Collection[int] | None) -> None:
        self._folder = folder
        self._ranks = None if ranks is None else frozenset(ranks)
        self._nodes = None if nodes is None else frozenset(nodes)
        self._found: dict[int, Path] = {}
        self._indexes: dict[int, LogIndexReader] = {}
        self._streams: dict[tuple[Source, str], LogStream] = {}
        self._owed: dict[tuple[Source, str], Growth] = {}

    def discover(self) -> int:
        """Look for nodes' folders that are new; return how many there are, asked for or not."""
        for name, path in _entries(self._folder):
            match = _NODE.fullmatch(name)
            if match and (node := int(match[1])) not in self._found:
                self._found[node] = path
                if self._nodes is None or node in self._nodes:
                    self._indexes[node] = LogIndexReader(path, node)
        return len(self._found)

    def streams(self) -> list[LogStream]:
        """Give all streams seen so far, by rank."""
        return [self._streams[key] for key in sorted(self._streams, key=lambda key: (key[0], key[1] != "o"))]

    def growths(self) -> Iterator[Growth]:
        """Yield what the indexes told since the last call, in order of time over all nodes."""
        owed, self._owed = self._owed, {}
        yield from owed.values()
        indexes = [index.read() for _, index in sorted(self._indexes.items())]
        yield from heapq.merge(*indexes, key=lambda growth: growth.time)

    def open(self, growth: Growth) -> LogStream | None:
        """Give the stream that grew; None if it is not asked for or cannot be read that far yet."""
        if self._ranks is not None and growth.rank not in self._ranks:
            return None
        key = (Source(growth.rank, growth.node), growth.kind)
        stream = self._streams.get(key)
        if stream is None:
            path = self._found[growth.node] / contract.rank_log(growth.rank, KINDS[growth.kind])
            stream = self._streams[key] = LogStream(path, *key)
        if stream.size() < growth.end:
            self._owed[key] = growth
            return None
        self._owed.pop(key, None)
        return stream

    def unindexed(self, time: int) -> list[Growth]:
        """Tell of the bytes that no index told of, as if they had arrived at ``time``."""
        self._owed.clear()
        growths = []
        for node in sorted(self._indexes):
            for name, _ in _entries(self._found[node]):
                if match := _LOG.fullmatch(name):
                    rank = int(match[1]) if match[1] else contract.ALL_OF_A_NODE
                    growths.append(self._rest(node, rank, match[2][0], time))
        return sorted((g for g in growths if g), key=lambda g: (g.rank, g.node, g.kind != "o"))

    def _rest(self, node: int, rank: int, kind: str, time: int) -> Growth | None:
        stream = self.open(Growth(time, node, rank, kind, 0))
        if stream is None or (size := stream.size()) == stream.at:
            return None
        return Growth(time, node, rank, kind, size, restarted=size < stream.at)


def _entries(folder: Path) -> list[tuple[str, Path]]:
    """List a folder; one that is not there is empty."""
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, folder / entry.name) for entry in entries]
    except OSError:
        return []
