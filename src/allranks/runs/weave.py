"""Lines of ranks that share some, woven into one sequence that keeps the order of each rank."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import count, takewhile

from allranks.runs.pending import Pending, Run, Source, emit


def _age(stream: Pending) -> tuple[float, Source]:
    return stream.mark()[1], stream.source


class Weave:
    """One flush over ranks that share lines."""

    def __init__(self, streams: list[Pending]) -> None:
        self._streams = streams
        self._holders: Counter[Hashable] = Counter()
        self._heads: dict[Hashable, list[Pending]] = {}
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

    def _enter(self, stream: Pending) -> None:
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

    def _pull_any(self, blocked: list[Pending]) -> bool:
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
        run = emit(group, number)
        for stream in group:
            self._enter(stream)
        return run

    def _length(self, group: list[Pending]) -> int:
        """Count the lines that this group can emit together, so that a long run costs little per line."""
        first = group[0]
        after = first.at + 1
        if after == len(first.keys) or self._holders[first.keys[after]] != len(group):
            return 1
        most = min(stream.mark()[0] - stream.at for stream in group)
        most = min(most, max(stream.due - stream.at for stream in group))
        number, step = 1, 4
        while number < most:
            # Looked at in growing parts: most runs are short, and long ones must not be copied many times.
            part = min(step, most - number)
            alike = self._alike(group, number, part)
            number, step = number + alike, step * 4
            if alike < part:
                break
        return number

    def _alike(self, group: list[Pending], after: int, part: int) -> int:
        rows = zip(*(s.keys[s.at + after : s.at + after + part] for s in group), strict=True)
        size, holders = len(group), self._holders
        return sum(1 for _ in takewhile(lambda row: holders[row[0]] == size == row.count(row[0]), rows))
