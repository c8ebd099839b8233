"""Merges equal lines that several ranks write at about the same time into one line.

Each rank's lines keep their order, and older lines come first. A line waits while another rank has it pending behind
other lines: those are emitted first, so that the line is emitted once for both. If ranks wait for each other (one has
A, B and the other B, A), the oldest line is emitted alone.

Comparing lines is the largest cost, so in a flood they are compared only if the first lines of two ranks are equal.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from typing import NamedTuple

#: More pending bytes are a flood, too much to process line by line; bytes per rank to compare in a flood.
_FLOOD, _SAMPLE = 1 << 18, 8192
#: A line without its newline; the second of two equal lines of a rank is (line, 1).
_Line = bytes | tuple[bytes, int]


class LogSource(NamedTuple):
    """Source of lines: the global rank, or ``contract.ALL_OF_A_NODE``, and the node."""

    rank: int
    node: int


class LogBlock(NamedTuple):
    """Consecutive lines, each with its newline, that all ``sources`` wrote, and their arrival on the last source."""

    arrival: float
    sources: tuple[LogSource, ...]
    text: bytes


class Dedup:
    """The pending lines of all ranks' stdout, or of their stderr: (arrival, complete lines), oldest first."""

    def __init__(self) -> None:
        self._pending: dict[LogSource, list[tuple[float, bytes]]] = {}

    def add(self, source: LogSource, arrival: float, lines: bytes) -> None:
        """Add lines, each with its newline, that arrived no earlier than previous ones."""
        self._pending.setdefault(source, []).append((arrival, lines))

    def oldest(self) -> float | None:
        """Return the arrival of the oldest pending line; None if none is pending."""
        return min((blocks[0][0] for blocks in self._pending.values()), default=None)

    def common(self, everyone: int) -> list[LogBlock]:
        """Emit the lines that are next on all ``everyone`` ranks, since no other rank can still write them."""
        firsts = {blocks[0][1].partition(b"\n")[0] for blocks in self._pending.values()}
        if len(self._pending) < everyone or len(firsts) != 1:
            return []
        streams = self._streams()
        holders = _count_holders(streams)
        emitted = []
        while all(stream.lines for stream in streams) and len({stream.lines[-1] for stream in streams}) == 1:
            emitted.append(_take(streams, holders))
        self._keep(streams)
        return emitted

    def flush(self, until: float) -> list[LogBlock]:
        """Emit all lines that arrived by ``until``, and lines of other ranks that must be emitted with them."""
        oldest = self.oldest()
        if oldest is None or oldest > until:
            return []
        if self._has_equal_lines():
            streams = self._streams()
            emitted = [*_merge(streams, until)]
            self._keep(streams)
            return emitted
        emitted = []
        for source, blocks in [*self._pending.items()]:
            due = [*takewhile(lambda block: block[0] <= until, blocks)]
            emitted += [LogBlock(arrival, (source,), lines) for arrival, lines in due]
            self._pending[source] = blocks[len(due) :]
            if len(due) == len(blocks):
                del self._pending[source]
        # Sorting is stable: lines of a rank with equal arrival keep their order.
        return sorted(emitted, key=lambda block: block[:2])

    def _has_equal_lines(self) -> bool:
        if len(self._pending) == 1:
            return False
        is_flood = sum(len(lines) for blocks in self._pending.values() for _, lines in blocks) >= _FLOOD
        seen: set[bytes] = set()
        for blocks in self._pending.values():
            text = blocks[0][1][:_SAMPLE] if is_flood else b"".join(lines for _, lines in blocks)
            lines = text.split(b"\n")[:-1]
            if not seen.isdisjoint(lines):
                return True
            seen.update(lines)
        return False

    def _streams(self) -> list[_Stream]:
        return [_Stream(source, blocks) for source, blocks in sorted(self._pending.items())]

    def _keep(self, streams: Iterable[_Stream]) -> None:
        self._pending = {stream.source: stream.left() for stream in streams if stream.lines}


class _Stream:
    """Pending lines of one rank.

    Attributes:
        lines: pending lines, the next one last; the second of two equal ones is (line, 1).
        marks: for each group of lines that arrived together, the earliest last: number of later lines, and arrival.
        held: all lines, including those taken.
    """

    __slots__ = ("_blocks", "_is_cut", "held", "lines", "marks", "source")

    def __init__(self, source: LogSource, blocks: list[tuple[float, bytes]]) -> None:
        self.source = source
        self._blocks = blocks
        self._is_cut = False
        self.lines: list[_Line] = []
        self.marks: list[tuple[int, float]] = []
        for arrival, text in reversed(blocks):
            self.marks.append((len(self.lines), arrival))
            self.lines += reversed(text[:-1].split(b"\n"))
        self.held = set(self.lines)
        if len(self.held) < len(self.lines):
            seen: Counter[_Line] = Counter()
            for place in reversed(range(len(self.lines))):
                line = self.lines[place]
                if seen[line] and isinstance(line, bytes):
                    self.lines[place] = (line, seen[line])
                seen[line] += 1
            self.held = set(self.lines)

    def take(self, number: int) -> list[_Line]:
        """Take the next lines, which arrived together."""
        taken = self.lines[: -number - 1 : -1]
        del self.lines[-number:]
        self._is_cut = len(self.lines) > self.marks[-1][0]
        if not self._is_cut:
            self.marks.pop()
        return taken

    def left(self) -> list[tuple[float, bytes]]:
        """Return the blocks of the lines that were not taken."""
        blocks = self._blocks[-len(self.marks) :]
        if self._is_cut:
            start, arrival = self.marks[-1]
            blocks[0] = (arrival, _text(reversed(self.lines[start:])))
        return blocks


def _merge(streams: list[_Stream], until: float) -> Iterator[LogBlock]:
    """Emit lines until none is due."""
    holders = _count_holders(streams)
    heads = [(stream.marks[-1][1], stream.source, stream) for stream in streams]
    heapq.heapify(heads)
    while heads and heads[0][0] <= until:
        arrival, source, stream = heads[0]
        if not stream.lines:
            heapq.heappop(heads)
        elif stream.marks[-1][1] > arrival:
            heapq.heapreplace(heads, (stream.marks[-1][1], source, stream))
        else:
            yield _take(_next(stream, streams, holders), holders)


def _count_holders(streams: Iterable[_Stream]) -> Counter[_Line]:
    holders: Counter[_Line] = Counter()
    for stream in streams:
        holders.update(stream.lines)
    return holders


def _next(oldest: _Stream, streams: list[_Stream], holders: Counter[_Line]) -> list[_Stream]:
    """Return the streams whose next line to emit now: the oldest line, or one that must precede it."""
    stream = oldest
    seen: set[_Stream] = set()
    while stream not in seen:
        seen.add(stream)
        line = stream.lines[-1]
        if holders[line] == 1:
            return [stream]
        group = [other for other in streams if other.lines and other.lines[-1] == line]
        if len(group) == holders[line]:
            return group
        stream = next(other for other in streams if line in other.held and other not in group)
    # They wait for each other: emit the oldest line now, and the others' copy later.
    line = oldest.lines[-1]
    group = [other for other in streams if other.lines and other.lines[-1] == line]
    holders[line] -= len(group)
    for stream in group:
        stream.held.remove(line)
    return group


def _take(group: list[_Stream], holders: Counter[_Line]) -> LogBlock:
    """Take the next line of a group, and following lines that arrived with it on exactly these streams."""
    size = len(group)
    most = min([len(stream.lines) - stream.marks[-1][0] for stream in group])
    arrival = max([stream.marks[-1][1] for stream in group])
    number = 1
    if most > 1 and holders[group[0].lines[-2]] == size:
        rows = zip(*[islice(reversed(stream.lines), 1, most) for stream in group], strict=True)
        number += sum(1 for _ in takewhile(lambda row: holders[row[0]] == size == row.count(row[0]), rows))
    taken = [stream.take(number) for stream in group]
    return LogBlock(arrival, tuple([stream.source for stream in group]), _text(taken[0]))


def _text(lines: Iterable[_Line]) -> bytes:
    return b"\n".join([line if isinstance(line, bytes) else line[0] for line in lines]) + b"\n"
