"""Stacks of ranks as faulthandler writes them, read and grouped: agents and the launcher do so alike."""

from __future__ import annotations

import re
from dataclasses import dataclass

_STACK = re.compile(r"(?:Current thread 0x[0-9a-f]+(?: \[.*\])?|Stack) \(most recent call first\):$")
_OURS = re.compile(r"/allranks/agent/workers/script\.py$")
_FRAME = re.compile(r'  File "([^"]+)", line (\d+) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """A frame of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class RankStack:
    """The Python stack of a rank's main thread, innermost frame first."""

    rank: int
    node: int
    frames: tuple[Frame, ...]


def parse(dump: str, rank: int, node: int) -> RankStack:
    """Return a rank's stack from what faulthandler wrote, of which the last one counts."""
    frames: list[Frame] = []
    is_main = False
    for line in dump.splitlines():
        if _STACK.match(line):
            frames, is_main = [], True
        elif is_main and (frame := _FRAME.match(line)):
            is_main = not _OURS.search(frame[1])  # Below the script is what has started it.
            frames += [Frame(frame[1], int(frame[2]), frame[3])] if is_main else []
    return RankStack(rank, node, tuple(frames))


def groups(ranks: tuple[RankStack, ...]) -> list[tuple[list[int], RankStack]]:
    """Return the ranks that stand at the same place, with the stack of one of them; the fewest first."""
    found: dict[tuple[Frame, ...], list[RankStack]] = {}
    for each in ranks:
        found.setdefault(each.frames, []).append(each)
    grouped = [([each.rank for each in same], same[0]) for same in found.values()]
    return sorted(grouped, key=lambda group: (len(group[0]), group[0]))
