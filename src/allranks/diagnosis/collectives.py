"""Whether ranks that all timed out had called different collectives, by what NCCL's watchdog says of each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from allranks.diagnosis.model import Match

#: The collective that a rank waited for.
_WAITED = re.compile(r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<kind>\w+)(?:, NumelIn=(?P<size>\d+))?")
#: In which process group that was: another line says so.
_GROUP = re.compile(r"\[(?P<group>PG [^\]]*) Rank \d+\] .*?\bwork(?: sequence id)?: (?P<number>\d+)")
#: Calls that ranks make with each other, not all together, or with other sizes on each.
_OF_SOME = re.compile(r"SEND|RECV|COALESCED|UNKNOWN")
_OF_ANY_SIZE = re.compile(r"ALLTOALL")


@dataclass(frozen=True)
class _Wait:
    rank: int
    number: int
    kind: str
    size: str
    match: Match

    @property
    def told(self) -> str:
        size = f" of {self.size} elements" if self.size else ""
        return f"rank {self.rank} waited in {self.kind}{size} (number {self.number})"


def mismatch(found: Sequence[Match]) -> tuple[str, Match, Match] | None:
    """Return how the collectives of two ranks of one group differ, and where that is said; None if they do not.

    The next one after that of another rank tells as much: one of the two called one more, or left one out.
    """
    groups = {}
    for match in found:
        if named := _GROUP.search(match.line.text):
            groups[match.line.rank, int(named["number"])] = named["group"]
    waits: dict[str, dict[int, _Wait]] = defaultdict(dict)
    for match in found:
        if (wait := _wait(match)) and (not groups or (wait.rank, wait.number) in groups):
            waits[groups.get((wait.rank, wait.number), "")].setdefault(wait.rank, wait)
    for of_group in waits.values():
        first, *others = of_group.values()
        for other in others:
            if _differ(first, other):
                return f"{first.told}, {other.told}", first.match, other.match
    return None


def _wait(match: Match) -> _Wait | None:
    named = _WAITED.search(match.line.text)
    if not named or match.line.rank is None or _OF_SOME.search(named["kind"]):
        return None
    size = "" if _OF_ANY_SIZE.search(named["kind"]) else named["size"] or ""
    return _Wait(match.line.rank, int(named["number"]), named["kind"], size, match)


def _differ(one: _Wait, other: _Wait) -> bool:
    if one.number == other.number:
        return (one.kind, one.size) != (other.kind, other.size)
    return abs(one.number - other.number) == 1
