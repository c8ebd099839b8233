"""The log files of an attempt: discovered as they appear, read by the nodes' indexes, cut into complete lines.

Unfinished lines wait, endless ones are cut, and ``\\r`` overwrites.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from allranks import contract
from allranks.logs.dedup import LogSource
from allranks.logs.lineform import Frames
from allranks.record.logindex import KINDS, Growth, LogIndexReader

_NODE = re.compile(r"node-(\d+)")
_LOG = re.compile(r"(?:rank-(\d+)|node)\.(out|err)")
#: A line longer than this is split, to bound memory.
LONGEST = 1 << 20
#: Control sequences (ECMA-48) for cursor, erasing and colours, with which progress bars erase themselves.
_CONTROL = re.compile(rb"\x1b\[[0-?]*[@-~]")
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


class LogStream:
    """The stdout or stderr of one rank, or of all ranks of a node, with the position read so far.

    The file is opened for each read, because thousands of ranks would need thousands of open files.
    """

    def __init__(self, path: Path, source: LogSource, kind: str) -> None:
        self.source = source
        self.kind = kind
        self.at = 0
        self.cutter = LineCutter()
        self.frames = Frames()
        self._path = os.fspath(path)

    def size(self) -> int:
        """Return the size of the file; 0 if it is gone."""
        with contextlib.suppress(OSError):
            return os.stat(self._path).st_size  # noqa: PTH116
        return 0

    def read(self, end: int, most: int) -> bytes:
        """Read up to offset ``end``, at most ``most`` bytes; nothing while the file is shorter than ``end``."""
        length = min(end - self.at, most)
        # Shorter than the index says: it was truncated, or a shared file system shows an old state.
        if length <= 0 or self.size() < end:
            return b""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, _READ_FLAGS)
            try:
                data = os.pread(descriptor, length, self.at)
            finally:
                os.close(descriptor)
            self.at += len(data)
            return data
        return b""

    def restart(self) -> bytes:
        """Start again at the beginning of a truncated file; return the unfinished line."""
        self.at = 0
        return self.cutter.end()

    def skip_to(self, at: int) -> None:
        """Continue at offset ``at``, and drop the unfinished line."""
        self.at = at
        self.cutter.end()


class AttemptLogs:
    """The log files of an attempt for some global ranks and nodes; None for all."""

    def __init__(self, folder: Path, ranks: Collection[int] | None, nodes: Collection[int] | None) -> None:
        self._folder = folder
        self._ranks = None if ranks is None else frozenset(ranks)
        self._nodes = None if nodes is None else frozenset(nodes)
        self._found: dict[int, Path] = {}
        self._indexes: dict[int, LogIndexReader] = {}
        self._streams: dict[tuple[LogSource, str], LogStream] = {}
        self._unread: dict[tuple[LogSource, str], Growth] = {}

    def discover(self) -> int:
        """Find new directories of nodes; return how many there are, selected or not."""
        for name, path in _entries(self._folder):
            match = _NODE.fullmatch(name)
            if match and (node := int(match[1])) not in self._found:
                self._found[node] = path
                if self._nodes is None or node in self._nodes:
                    self._indexes[node] = LogIndexReader(path, node)
        return len(self._found)

    def streams(self) -> list[LogStream]:
        """Return all streams seen so far, by rank."""
        return [self._streams[key] for key in sorted(self._streams, key=lambda key: (key[0], key[1] != "o"))]

    def growths(self) -> Iterator[Growth]:
        """Yield new entries of the indexes, in order of time over all nodes."""
        unread, self._unread = self._unread, {}
        yield from unread.values()
        indexes = [index.read() for _, index in sorted(self._indexes.items())]
        yield from heapq.merge(*indexes, key=lambda growth: growth.time)

    def open(self, growth: Growth) -> LogStream | None:
        """Return the stream that grew; None if it is not selected or cannot be read that far yet."""
        if self._ranks is not None and growth.rank not in self._ranks:
            return None
        key = (LogSource(growth.rank, growth.node), growth.kind)
        stream = self._streams.get(key)
        if stream is None:
            path = self._found[growth.node] / contract.rank_log(growth.rank, KINDS[growth.kind])
            stream = self._streams[key] = LogStream(path, *key)
        if stream.size() < growth.end:
            self._unread[key] = growth
            return None
        self._unread.pop(key, None)
        return stream

    def unindexed(self, time: int) -> list[Growth]:
        """Return the bytes that no index has, as growths at ``time``."""
        self._unread.clear()
        growths = []
        for node in self._indexes:
            for name, _ in _entries(self._found[node]):
                if match := _LOG.fullmatch(name):
                    rank = int(match[1]) if match[1] else contract.ALL_OF_A_NODE
                    growth = Growth(time, node, rank, match[2][0], 0)
                    stream = self.open(growth)
                    if stream and (size := stream.size()) != stream.at:
                        growths.append(growth._replace(end=size, restarted=size < stream.at))
        return sorted(growths, key=lambda growth: (growth.rank, growth.node, growth.kind != "o"))


def _entries(folder: Path) -> list[tuple[str, Path]]:
    """List a directory; one that is missing is empty."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [(entry.name, folder / entry.name) for entry in entries]
    return []


class LineCutter:
    """Cuts what one stream wrote into blocks: complete lines, each ending in ``\\n``."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes of the stream, at most ``LONGEST``; return the newly complete lines."""
        cut = chunk.rfind(b"\n") + 1
        if not cut:
            return self._hold(self._rest + chunk)
        block = _tidy(b"".join((self._rest, memoryview(chunk)[:cut])))
        self._rest = b""
        end = block.find(b"\n")
        if end > LONGEST:  # Other lines are within a chunk, and shorter.
            block = b"\n".join(_in_pieces(block[:end])) + block[end:]
        return block + self._hold(chunk[cut:])

    def end(self) -> bytes:
        """Return the unfinished line at the end of the stream, with a newline."""
        rest, self._rest = self._rest, b""
        return _tidy(rest + b"\n") if rest else b""

    def progress(self) -> bytes | None:
        """Return the text of an unfinished line with ``\\r``: a progress bar."""
        if b"\r" not in self._rest:
            return None
        text = self._rest.strip(b"\r").rpartition(b"\r")[2]
        return None if _is_blank(text) else text

    def unfinished(self) -> bytes:
        """Return the text of an unfinished line without ``\\r``: a prompt, or the start of a line."""
        return b"" if b"\r" in self._rest else self._rest

    def _hold(self, text: bytes) -> bytes:
        if b"\r" in text:
            body = text.rstrip(b"\r")
            # A bar that runs for hours is one line: keep only its current text. The \r before it marks the line
            # as a bar; the one after it is kept because \n may follow.
            text = body[max(body.rfind(b"\r"), 0) :] + (b"\r" if len(body) < len(text) else b"")
        *pieces, self._rest = _in_pieces(text)
        return b"".join(_tidy(piece + b"\n") for piece in pieces)


def _tidy(block: bytes) -> bytes:
    """Replace ``\\r\\n`` by ``\\n``, and keep only the text after the last ``\\r`` of each line.

    A bar that was erased, by spaces or a control sequence, leaves no line.
    """
    if b"\r" not in block:  # A search for one byte: replacing is a third of the time of merging.
        return block
    kept = []
    for line in block.replace(b"\r\n", b"\n")[:-1].split(b"\n"):
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        if b"\r" not in line or not _is_blank(shown):
            kept.append(shown + b"\n")
    return b"".join(kept)


def _is_blank(text: bytes) -> bool:
    return not _CONTROL.sub(b"", text).strip()


def _in_pieces(line: bytes) -> list[bytes]:
    """Split a line that is too long, but not inside a UTF-8 character."""
    pieces = []
    while len(line) > LONGEST:
        cut = next((cut for cut in range(LONGEST, LONGEST - 4, -1) if line[cut] & 0xC0 != 0x80), LONGEST)
        pieces.append(line[:cut])
        line = line[cut:]
    return [*pieces, line]
