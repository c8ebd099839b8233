"""Stacks of ranks as faulthandler writes them, read and grouped: agents and the launcher do so alike."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass

_STACK = re.compile(r"(?:Current thread 0x[0-9a-f]+(?: \[.*\])?|Stack) \(most recent call first\):$")
_OURS = re.compile(r"/allranks/agent/workers/rank\.py$")
_FRAME = re.compile(r'  File "([^"]+)", line (\d+) in (.*)$')
#: How the line begins that a rank adds to its stack, from torch's flight recorder.
COLLECTIVE = "Collective: "


@dataclass(frozen=True)
class Frame:
    """A frame of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has started and not completed.

    Attributes:
        name: as torch records it.
        number: counts the collectives of its process group, from 1.
        bytes: of this rank's input; 0 if there is none, or it is not known.
        group: the name of its process group; that of all ranks is 0.
    """

    name: str
    number: int
    bytes: int
    group: str


@dataclass(frozen=True)
class RankStack:
    """The Python stack of a rank's main thread, innermost frame first, and the collective that is pending."""

    rank: int
    node: int
    frames: tuple[Frame, ...]
    collective: Collective | None = None


def parse(dump: str, rank: int, node: int) -> RankStack | None:
    """Return a rank's stack from what faulthandler wrote, of which the last one counts; None if there is none."""
    frames: list[Frame] | None = None
    is_main, collective = False, None
    for line in dump.splitlines():
        if _STACK.match(line):
            frames, is_main = [], True
        elif line.startswith(COLLECTIVE):
            with suppress(ValueError):  # Half of it is written.
                found = json.loads(line.removeprefix(COLLECTIVE))
                collective = found and Collective(**found)
        elif frames is not None and is_main and (frame := _FRAME.match(line)):
            is_main = not _OURS.search(frame[1])  # Below the script is what has started it.
            frames += [Frame(frame[1], int(frame[2]), frame[3])] if is_main else []
    return None if frames is None else RankStack(rank, node, tuple(frames), collective)


def groups(ranks: tuple[RankStack, ...]) -> list[tuple[list[int], RankStack]]:
    """Return the ranks that stand at the same place, with the stack of one of them; the fewest first."""
    found: dict[tuple[tuple[Frame, ...], Collective | None], list[RankStack]] = {}
    for each in ranks:
        found.setdefault((each.frames, each.collective), []).append(each)
    grouped = [([each.rank for each in same], same[0]) for same in found.values()]
    return sorted(grouped, key=lambda group: (len(group[0]), group[0]))
