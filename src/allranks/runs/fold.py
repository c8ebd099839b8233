"""Lines that are the same on several ranks at the same time become one line.

Each rank's pending lines are a sequence. Lines are emitted so that every sequence keeps its order; a line
that several ranks have pending waits until it is the next one on all of them and is then emitted once. Where
that cannot be (one rank has A, B and the other B, A), the older line goes out alone.

To look at each line costs more than all else. In a flood of ranks that have shared no line for a while, only
the first lines of each are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from allranks.runs.pending import Pending, Run, Source, emit
from allranks.runs.weave import Weave

#: So many bytes at once are a flood: nobody reads it line by line.
_FLOOD = 1 << 18
#: Ranks that have shared no line in so many floods in a row are strangers.
_STRANGERS = 3


class Fold:
    """The pending lines of one kind of stream (stdout or stderr) of all ranks."""

    def __init__(self) -> None:
        self._pending: dict[Source, Pending] = {}
        self._floods_apart = 0

    def add(self, source: Source, arrival: float, block: bytes) -> None:
        """Take lines, each with its newline, that arrived at a time, not before those given earlier."""
        if source not in self._pending:
            self._pending[source] = Pending(source)
        self._pending[source].blocks.append((arrival, block))

    def oldest(self) -> float | None:
        """Give the arrival of the oldest pending line."""
        return min((pending.oldest() for pending in self._pending.values()), default=None)

    def common(self, everyone: int) -> list[Run]:
        """Emit what is pending alike on all ``everyone`` ranks: nobody is left to wait for."""
        streams = list(self._pending.values())
        if len(streams) < everyone or len({stream.first() for stream in streams}) != 1:
            return []
        for stream in streams:
            stream.split()
        rows = zip(*(stream.lines for stream in streams), strict=False)
        number = sum(1 for _ in takewhile(lambda row: row.count(row[0]) == len(row), rows))
        runs = []
        while number:
            marks = [stream.mark() for stream in streams]
            step = min(number, *(end - stream.at for stream, (end, _) in zip(streams, marks, strict=True)))
            runs.append(emit(streams, step))
            number -= step
        self._tidy()
        return runs

    def flush(self, until: float) -> list[Run]:
        """Emit all lines that arrived by ``until``, and those of other ranks that fold with them."""
        oldest = self.oldest()
        if oldest is None or oldest > until:
            return []
        streams = list(self._pending.values())
        if self._are_apart(streams):
            # By arrival; of one time the lowest rank first, and what a rank wrote in its order.
            runs = sorted((run for stream in streams for run in stream.shed(until)), key=lambda run: run[:2])
        else:
            runs = _woven(streams, until)
        self._tidy()
        return runs

    def _are_apart(self, streams: list[Pending]) -> bool:
        """Tell whether no two ranks share a line, or whether that may be taken for granted."""
        if len(streams) == 1:
            return True
        is_flood = sum(stream.size() for stream in streams) >= _FLOOD
        apart = _disjoint(stream.sample() for stream in streams)
        if apart and not (is_flood and self._floods_apart >= _STRANGERS):
            apart = _disjoint(stream.peek() for stream in streams)
        self._floods_apart = self._floods_apart + is_flood if apart else 0
        return apart

    def _tidy(self) -> None:
        for stream in list(self._pending.values()):
            if not stream.tidy():
                del self._pending[stream.source]


def _disjoint(sequences: Iterable[list[bytes]]) -> bool:
    """Tell whether no line is in two of the sequences."""
    seen: set[bytes] = set()
    for lines in sequences:
        if not seen.isdisjoint(lines):
            return False
        seen.update(lines)
    return True


def _woven(streams: list[Pending], until: float) -> list[Run]:
    for stream in streams:
        stream.split()
        stream.start(until)
    return list(Weave(streams).runs())
