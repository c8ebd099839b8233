"""Lines of one rank that have arrived and are not yet shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import NamedTuple

#: So many bytes at the front are looked at where a sample will do.
_SAMPLE = 8192


class Source(NamedTuple):
    """Whose lines: the global rank, or ``contract.ALL_OF_A_NODE``, and the node."""

    rank: int
    node: int


class Run(NamedTuple):
    """Consecutive lines that all of ``sources`` wrote, and when the last of these had the first of them.

    Each line in ``text`` ends in a newline.
    """

    arrival: float
    sources: tuple[Source, ...]
    text: bytes


class Pending:
    """Lines of one rank: ``blocks`` as they came, and before these ``lines``, which somebody had to see one by one.

    Attributes:
        source: the rank.
        blocks: (arrival, lines that each end in a newline).
        lines: lines without their newline, older than the blocks.
        keys: the lines; the second of two equal ones under another name.
        marks: (index after the last line, arrival) of the lines that came together.
        at: index of the first line that has not been taken.
        due: index of the first line that may wait.
    """

    __slots__ = ("at", "blocks", "due", "keys", "lines", "marks", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.blocks: list[tuple[float, bytes]] = []
        self.lines: list[bytes] = []
        self.keys: list[Hashable] = []
        self.marks: list[tuple[int, float]] = []
        self.at = 0
        self.due = 0

    def oldest(self) -> float:
        """Give the arrival of the first line."""
        return self.marks[0][1] if self.marks else self.blocks[0][0]

    def size(self) -> int:
        """Count the bytes that are in blocks."""
        return sum(len(block) for _, block in self.blocks)

    def first(self) -> bytes:
        """Give the first line."""
        return self.lines[0] if self.lines else self.blocks[0][1].partition(b"\n")[0]

    def sample(self) -> list[bytes]:
        """Give some of the first lines."""
        block = b"" if self.lines else self.blocks[0][1]
        return self.lines[: _SAMPLE // 64] or block[: block.find(b"\n", _SAMPLE)].split(b"\n")

    def peek(self) -> list[bytes]:
        """Give all lines, and leave them as they are."""
        text = b"".join(block for _, block in self.blocks)
        return self.lines + text.split(b"\n")[:-1]

    def split(self) -> None:
        """Make lines of the blocks."""
        for arrival, block in self.blocks:
            self.lines += block[:-1].split(b"\n")
            self.marks.append((len(self.lines), arrival))
        self.blocks.clear()

    def start(self, until: float) -> None:
        """Find the lines that must go out now."""
        self.due = max((end for end, arrival in self.marks if arrival <= until), default=0)

    def name(self) -> None:
        """Name the second of two equal lines apart."""
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

    def take(self, number: int) -> bytes:
        """Take the next lines."""
        taken = self.lines[self.at : self.at + number]
        self.at += number
        return b"\n".join(taken) + b"\n"

    def shed(self, until: float) -> Iterator[Run]:
        """Emit what is due, whatever others have."""
        self.start(until)
        while self.at < self.due:
            end, arrival = self.mark()
            yield Run(arrival, (self.source,), self.take(end - self.at))
        while self.blocks and self.blocks[0][0] <= until:
            arrival, block = self.blocks.pop(0)
            yield Run(arrival, (self.source,), block)

    def tidy(self) -> bool:
        """Forget what was taken; tell whether anything is left."""
        del self.lines[: self.at]
        self.marks = [(end - self.at, arrival) for end, arrival in self.marks if end > self.at]
        self.at = self.due = 0
        self.keys = []
        return bool(self.lines or self.blocks)


def emit(group: list[Pending], number: int) -> Run:
    """Take the next lines, which are the same on all of a group."""
    arrival = max([stream.mark()[1] for stream in group])
    first, *others = group
    for stream in others:
        stream.at += number
    return Run(arrival, tuple(sorted([stream.source for stream in group])), first.take(number))
