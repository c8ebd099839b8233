"""Selects, formats and prefixes lines of merged logs, and shortens tracebacks.

The prefix is ``[3]`` for a rank, ``[1:3]`` on several nodes, ``[0,2-3]`` for equal lines of ranks, and
``[node 1]`` if all ranks of a node write into one file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import NamedTuple

from allranks import contract
from allranks.logs.cause import is_foreign
from allranks.logs.dedup import LogSource

#: Arrival, in ms since 1970, of bytes that no index has: sorts last.
UNKNOWN_ARRIVAL = 1 << 62
#: ANSI codes of colours that are readable on light and dark terminals; ranks cycle through them.
_COLOURS = (36, 33, 35, 32, 34, 31)
_REMEMBERED = 4096
_FRAME = re.compile(rb'  File "([^"]+)", line \d+, in ')
#: Starts of lines below a frame: its source line, and the number of repeats.
_BELOW = (b"    ", b"  [Previous line repeated ")
#: The package of a file, by the last directory of packages in its path; others belong to Python or allranks.
_PACKAGE = re.compile(r".*/(?:site|dist)-packages/([^/.]+)|.*/(allranks)/(?:agent|record|runtime|selftest|system)/")


class LineForm(NamedTuple):
    """Which lines to show, and how.

    Attributes:
        since: only lines that arrived at this time or later, in ms since 1970.
        pattern: only lines that contain a match.
        timestamps: put the local time of arrival before each line.
        as_json: write each line as a JSON object.
        fold_frames: show only the frames in the user's code and the last one in tracebacks, and count the others.
    """

    since: float = 0.0
    pattern: re.Pattern[bytes] | None = None
    timestamps: bool = False
    as_json: bool = False
    fold_frames: bool = False

    def chosen(self, arrival: float, text: bytes) -> bytes:
        """Return the lines of ``text`` to show."""
        if arrival < self.since:
            return b""
        if self.pattern is None:
            return text
        return b"".join(line + b"\n" for line in text[:-1].split(b"\n") if self.pattern.search(line))

    def stamp(self, arrival: float) -> bytes:
        """Format the time of arrival, which precedes the prefix and is known to about 0.1 s."""
        if not self.timestamps:
            return b""
        when = _moment(arrival)
        return (when.astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] if when else "-".ljust(23)).encode() + b" "

    def objects(self, kind: str, sources: tuple[LogSource, ...], arrival: float, text: bytes) -> Iterator[bytes]:
        """Write lines as JSON."""
        when = _moment(arrival)
        fields = {
            "time": when.isoformat(timespec="milliseconds") if when else None,
            "ranks": sorted(source.rank for source in sources if source.rank != contract.ALL_OF_A_NODE),
            "nodes": sorted({source.node for source in sources}),
            "stream": "stdout" if kind == "o" else "stderr",
        }
        for line in text[:-1].split(b"\n"):
            yield json.dumps({**fields, "text": line.decode(errors="replace")}).encode() + b"\n"


def _moment(arrival: float) -> datetime | None:
    """Return a time of arrival in UTC; None if unknown."""
    return datetime.fromtimestamp(arrival / 1000, timezone.utc) if arrival < UNKNOWN_ARRIVAL else None


def ranges(ranks: Iterable[int]) -> str:
    """Format ranks as ``0,2-3,7``."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


class Prefixes:
    """Makes the prefix of a line from the ranks that wrote it, with ``colour`` in a colour of the first rank."""

    def __init__(self, colour: bool = False) -> None:
        self._colour = colour
        self._several_nodes = False
        self._made: dict[tuple[LogSource, ...], bytes] = {}

    def set_several_nodes(self, several: bool) -> None:
        """Set whether the attempt has several nodes: prefixes of single ranks then include the node."""
        if several != self._several_nodes:
            self._several_nodes = several
            self._made.clear()

    def __call__(self, sources: tuple[LogSource, ...]) -> bytes:
        """Return the prefix, with the space after it."""
        if sources not in self._made:
            if len(self._made) >= _REMEMBERED:
                self._made.clear()
            self._made[sources] = self._make(sources)
        return self._made[sources]

    def _make(self, sources: tuple[LogSource, ...]) -> bytes:
        rank, node = sources[0]
        names = f"{node}:{rank}" if self._several_nodes and len(sources) == 1 else ranges(s.rank for s in sources)
        if rank == contract.ALL_OF_A_NODE:
            rank, names = node, f"node {ranges(s.node for s in sources)}"
        if self._colour:
            return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m[{names}]\x1b[0m ".encode()
        return f"[{names}] ".encode()


class Frames:
    """Counts the frames of one stream's tracebacks that are not in the user's code: ``  … 12 frames in torch``.

    The last frame of a traceback is shown wherever it is: it names the call that failed.
    """

    def __init__(self) -> None:
        self._count = 0
        self._packages: dict[str, None] = {}
        self._last: list[bytes] = []

    def fold(self, block: bytes) -> bytes:
        """Return complete lines without such frames; trailing ones are counted with the next line."""
        if not self._last and b'  File "' not in block:
            return block
        return b"".join(map(self._line, block.splitlines(keepends=True)))

    def end(self) -> bytes:
        """Return the line that counts the frames left out last, if there are any, and the last frame."""
        last, self._last = b"".join(self._last), []
        return self._counted() + last

    def _counted(self) -> bytes:
        if not self._count:
            return b""
        frames, packages = f"{self._count} frame{'s' * (self._count > 1)}", ", ".join(self._packages)
        self._count, self._packages = 0, {}
        return f"  … {frames} in {packages}\n".encode()

    def _line(self, line: bytes) -> bytes:
        if found := _FRAME.match(line):
            self._leave_out_last()
            if not is_foreign(found[1].decode(errors="replace")):
                return self._counted() + line
            self._last = [line]
            return b""
        if self._last and line.startswith(_BELOW):
            self._last.append(line)
            return b""
        return self.end() + line

    def _leave_out_last(self) -> None:
        if self._last and (found := _FRAME.match(self._last[0])):
            package = _PACKAGE.match(found[1].decode(errors="replace"))
            self._count += 1
            self._packages[(package[1] or package[2]) if package else "python"] = None
            self._last = []
