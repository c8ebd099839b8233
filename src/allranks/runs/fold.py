"""Lines that are the same on several ranks at the same time become one line.

Each rank's pending lines are a sequence. Lines are emitted so that every sequence keeps its order; a line
that several ranks have pending waits until it is the next one on all of them and is then emitted once. Where
that cannot be (one rank has A, B and the other B, A), the older line goes out alone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import count, takewhile
from typing import NamedTuple


class Source(NamedTuple):
    """Whose lines: the global rank, and the node that it is on."""

    rank: int
    node: int


class Run(NamedTuple):
    """Consecutive lines that all of ``sources`` wrote, and when the last of these had the first of them."""

    arrival: float
    sources: tuple[Source, ...]
    lines: list[bytes]


class _Pending:
    """Lines of one rank that are not yet emitted; ``marks`` are (index after the last line, arrival)."""

    __slots__ = ("at", "due", "keys", "lines", "marks", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.lines: list[bytes] = []
        self.keys: list[Hashable] = []
        self.marks: list[tuple[int, float]] = []
        self.at = 0
        self.due = 0

    def add(self, arrival: float, lines: list[bytes]) -> None:
        self.lines += lines
        self.marks.append((len(self.lines), arrival))

    def start(self, until: float) -> int:
        """Begin a flush: count the lines that must go out, and name the second of two equal lines apart."""
        self.due = max((end for end, arrival in self.marks if arrival <= until), default=0)
        return self.due

    def name(self) -> None:
        self.keys = list(self.lines)
        if len(set(self.lines)) == len(self.lines):
            return
        seen: Counter[bytes] = Counter()
        for position, line in enumerate(self.lines):
            if seen[line]:
                self.keys[position] = (line, seen[line])
            seen[line] += 1

    def mark(self) -> tuple[int, float]:
        """Give the end and the arrival of the lines that came together with the next one."""
        while self.marks[0][0] <= self.at:
            self.marks.pop(0)
        return self.marks[0]

    def take(self, number: int) -> list[bytes]:
        taken = self.lines[self.at : self.at + number]
        self.at += number
        return taken

    def tidy(self) -> None:
        del self.lines[: self.at]
        self.marks = [(end - self.at, arrival) for end, arrival in self.marks if end > self.at]
        self.at = self.due = 0
        self.keys = []


class Fold:
    """The pending lines of one kind of stream (stdout or stderr) of all ranks."""

    def __init__(self) -> None:
        self._pending: dict[Source, _Pending] = {}

    def add(self, source: Source, arrival: float, lines: list[bytes]) -> None:
        """Take lines (without their newline) that arrived at a time, not before those given earlier."""
        if source not in self._pending:
            self._pending[source] = _Pending(source)
        self._pending[source].add(arrival, lines)

    def oldest(self) -> float | None:
        """Give the arrival of the oldest pending line."""
        return min((pending.marks[0][1] for pending in self._pending.values()), default=None)

    def common(self, everyone: int) -> list[Run]:
        """Emit what is pending alike on all ``everyone`` ranks: nobody is left to wait for."""
        streams = list(self._pending.values())
        if len(streams) < everyone or not streams:
            return []
        rows = zip(*(stream.lines for stream in streams), strict=False)
        number = sum(1 for _ in takewhile(lambda row: row.count(row[0]) == len(row), rows))
        runs = []
        while number:
            marks = [stream.mark() for stream in streams]
            step = min(number, *(end - stream.at for stream, (end, _) in zip(streams, marks, strict=True)))
            runs.append(_emit(streams, step))
            number -= step
        self._tidy()
        return runs

    def flush(self, until: float) -> list[Run]:
        """Emit all lines that arrived by ``until``, and those of other ranks that fold with them."""
        streams = list(self._pending.values())
        if not sum([stream.start(until) for stream in streams]):
            return []
        runs = _apart(streams) if _disjoint(streams) else list(_Weave(streams).runs())
        self._tidy()
        return runs

    def _tidy(self) -> None:
        for stream in list(self._pending.values()):
            stream.tidy()
            if not stream.lines:
                del self._pending[stream.source]


def _disjoint(streams: list[_Pending]) -> bool:
    """Tell whether no two ranks share a line: nearly always so in a flood, and quick to know."""
    seen: set[bytes] = set()
    for stream in streams[:-1]:
        if not seen.isdisjoint(stream.lines):
            return False
        seen.update(stream.lines)
    return seen.isdisjoint(streams[-1].lines)


def _apart(streams: list[_Pending]) -> list[Run]:
    """Emit the lines that are due of ranks that share none, by arrival."""
    runs = []
    for stream in streams:
        while stream.at < stream.due:
            end, arrival = stream.mark()
            runs.append(Run(arrival, (stream.source,), stream.take(end - stream.at)))
    return sorted(runs, key=lambda run: run[:2])


def _emit(group: list[_Pending], number: int) -> Run:
    arrival = max(stream.mark()[1] for stream in group)
    taken = [stream.take(number) for stream in group]
    return Run(arrival, tuple(sorted(stream.source for stream in group)), taken[0])


def _age(stream: _Pending) -> tuple[float, Source]:
    return stream.mark()[1], stream.source


class _Weave:
    """One flush over ranks that share lines."""

    def __init__(self, streams: list[_Pending]) -> None:
        self._streams = streams
        self._holders: Counter[Hashable] = Counter()
        self._heads: dict[Hashable, list[_Pending]] = {}
        self._ready: list[tuple[float, Source, int, Hashable]] = []
        self._offers = count()
        for stream in streams:
            stream.name()
            self._holders.update(stream.keys)
        for stream in streams:
            self._enter(stream)

    def runs(self) -> Iterator[Run]:
        """Emit until no line is due any more."""
        while True:
            while self._ready:
                key = heapq.heappop(self._ready)[-1]
                if self._is_next(key):
                    yield self._advance(key)
            blocked = [stream for stream in self._streams if stream.at < stream.due]
            if not blocked:
                return
            blocked.sort(key=_age)
            if not self._pull_any(blocked):
                yield self._advance(blocked[0].keys[blocked[0].at])

    def _is_next(self, key: Hashable) -> bool:
        """Tell whether a line is the next one on all ranks that have it."""
        return key in self._heads and len(self._heads[key]) == self._holders[key]

    def _enter(self, stream: _Pending) -> None:
        """Put a stream among those whose next line is this one."""
        if stream.at < len(stream.keys):
            key = stream.keys[stream.at]
            self._heads.setdefault(key, []).append(stream)
            self._offer(key)

    def _offer(self, key: Hashable) -> None:
        """Note a line that is next on all ranks that have it, and due on one of them."""
        group = self._heads[key]
        if self._is_next(key) and any(stream.at < stream.due for stream in group):
            arrival, source = min(map(_age, group))
            # The count decides before two lines are compared, which may be of two types.
            heapq.heappush(self._ready, (arrival, source, next(self._offers), key))

    def _pull_any(self, blocked: list[_Pending]) -> bool:
        if all(stream.due == len(stream.keys) for stream in self._streams):
            return False
        return any(self._pull(stream.keys[stream.at]) for stream in blocked)

    def _pull(self, key: Hashable) -> bool:
        """Make due what other ranks have before this line; tell whether that changed anything."""
        pulled = False
        for stream in self._streams:
            if stream.due == len(stream.keys) or stream in self._heads[key]:
                continue
            try:
                position = stream.keys.index(key, stream.at) + 1
            except ValueError:
                continue
            if position > stream.due:
                stream.due, pulled = position, True
                self._offer(stream.keys[stream.at])
        return pulled

    def _advance(self, key: Hashable) -> Run:
        group = self._heads.pop(key)
        number = self._length(group)
        # Only where a knot is cut do others still hold the line; the lines after it are on all or on none.
        self._holders[key] -= len(group)
        run = _emit(group, number)
        for stream in group:
            self._enter(stream)
        return run

    def _length(self, group: list[_Pending]) -> int:
        """Count the lines that this group can emit together, so that a long run costs little per line."""
        most = min(stream.mark()[0] - stream.at for stream in group)
        most = min(most, max(stream.due - stream.at for stream in group))
        first = group[0]
        if most == 1 or self._holders[first.keys[first.at + 1]] != len(group):
            return 1
        number, step = 1, 4
        while number < most:
            # Looked at in growing parts: most runs are short, and long ones must not be copied many times.
            part = min(step, most - number)
            alike = self._alike(group, number, part)
            number, step = number + alike, step * 4
            if alike < part:
                break
        return number

    def _alike(self, group: list[_Pending], after: int, part: int) -> int:
        rows = zip(*(s.keys[s.at + after : s.at + after + part] for s in group), strict=True)
        size, holders = len(group), self._holders
        return sum(1 for _ in takewhile(lambda row: holders[row[0]] == size == row.count(row[0]), rows))
