"""Which lines of merged logs are shown, and in which form: as they are, with their time, or as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone

from allranks import contract
from allranks.runs.pending import Source

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
        fold_frames: show of tracebacks only the frames in the user's code, and count the others.
    """

    since: float = 0.0
    pattern: re.Pattern[bytes] | None = None
    timestamps: bool = False
    as_json: bool = False
    fold_frames: bool = False

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
