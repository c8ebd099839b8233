"""The ``[3]`` before each line: by rank, by ``node:rank`` where nodes are several, folded as ``[0,2-3]``.

Where nobody can tell the ranks of a node apart it is ``[node 1]``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone

from allranks import contract
from allranks.runs.pending import Source

#: Codes of colours that can be read on light and on dark terminals; ranks take turns.
_COLOURS = (36, 33, 35, 32, 34, 31)
_REMEMBERED = 4096
#: Arrival, in ms since 1970, of what no index told of: last.
UNKNOWN_ARRIVAL = 1 << 62


@dataclass(frozen=True)
class LineForm:
    """Which lines are shown, and how.

    Attributes:
        since: only lines that arrived at this time or later, in ms since 1970.
        pattern: only lines that contain a match.
        timestamps: put the local time of arrival before each line.
        as_json: write each line as a JSON object.
    """

    since: float = 0.0
    pattern: re.Pattern[bytes] | None = None
    timestamps: bool = False
    as_json: bool = False

    def chosen(self, arrival: float, text: bytes) -> bytes:
        """Return those of some lines that are shown."""
        if arrival < self.since:
            return b""
        if self.pattern is None:
            return text
        return b"".join(line + b"\n" for line in text[:-1].split(b"\n") if self.pattern.search(line))

    def stamp(self, arrival: float) -> bytes:
        """Return what stands before the prefix; arrivals are known to about 0.1 s, but for what no index told of."""
        if not self.timestamps:
            return b""
        when = _moment(arrival)
        return (when.astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] if when else "-".ljust(23)).encode() + b" "

    def objects(self, kind: str, sources: tuple[Source, ...], arrival: float, text: bytes) -> Iterator[bytes]:
        """Write lines as JSON."""
        when = _moment(arrival)
        told = {
            "time": when.isoformat(timespec="milliseconds") if when else None,
            "ranks": sorted(source.rank for source in sources if source.rank != contract.ALL_OF_A_NODE),
            "nodes": sorted({source.node for source in sources}),
            "stream": "stdout" if kind == "o" else "stderr",
        }
        for line in text[:-1].split(b"\n"):
            yield json.dumps({**told, "text": line.decode(errors="replace")}).encode() + b"\n"


def _moment(arrival: float) -> datetime | None:
    """Return a time of arrival in UTC; None if it is not known."""
    return datetime.fromtimestamp(arrival / 1000, timezone.utc) if arrival < UNKNOWN_ARRIVAL else None


def ranges(ranks: Iterable[int]) -> str:
    """Write ranks as ``0,2-3,7``."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


class Prefixes:
    """Makes the prefix of a line from those who wrote it.

    Args:
        colour: whether each rank's prefix has a colour of its own.
    """

    def __init__(self, colour: bool = False) -> None:
        self._colour = colour
        self._several_nodes = False
        self._made: dict[tuple[Source, ...], bytes] = {}

    def set_several_nodes(self, several: bool) -> None:
        """Say whether the attempt has several nodes; a single rank is then named with its node."""
        if several != self._several_nodes:
            self._several_nodes = several
            self._made.clear()

    def __call__(self, sources: tuple[Source, ...]) -> bytes:
        """Return the prefix, with the space after it."""
        made = self._made.get(sources)
        if made is None:
            if len(self._made) >= _REMEMBERED:
                self._made.clear()
            made = self._made[sources] = self._make(sources)
        return made

    def _make(self, sources: tuple[Source, ...]) -> bytes:
        rank, node = sources[0]
        names = f"{node}:{rank}" if self._several_nodes and len(sources) == 1 else ranges(s.rank for s in sources)
        if rank == contract.ALL_OF_A_NODE:
            rank, names = node, f"node {ranges(s.node for s in sources)}"
        if self._colour:
            return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m[{names}]\x1b[0m ".encode()
        return f"[{names}] ".encode()
