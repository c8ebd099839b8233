"""Parses and groups stacks of ranks as faulthandler writes them, for agents and the launcher."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, NamedTuple

_STACK = re.compile(r"(?:Current thread 0x[0-9a-f]+(?: \[.*\])?|Stack) \(most recent call first\):$")
_OURS = re.compile(r"/allranks/agent/workers/rank\.py$")
_FRAME = re.compile(r'  File "([^"]+)", line (\d+) in (.*)$')
#: Start of the line from torch's flight recorder that a rank appends to its stack.
COLLECTIVE = "Collective: "


class Frame(NamedTuple):
    """A frame of a stack."""

    file: str
    line: int
    function: str


class Collective(NamedTuple):
    """A collective that a rank has started and not completed.

    Attributes:
        name: name in torch's record.
        number: sequence number in its process group, from 1.
        bytes: size of this rank's input; 0 if there is none, or it is unknown.
        group: name of its process group; that of all ranks is 0.
    """

    name: str
    number: int
    bytes: int
    group: str


class RankStack(NamedTuple):
    """The Python stack of a rank's main thread, innermost frame first, and the collective that is pending."""

    rank: int
    node: int
    frames: tuple[Frame, ...]
    collective: Collective | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        frames = [frame._asdict() for frame in self.frames]
        return {**self._asdict(), "frames": frames, "collective": self.collective and self.collective._asdict()}


def parse(dump: str, rank: int, node: int) -> RankStack | None:
    """Return the last stack in a dump of faulthandler; None if there is none."""
    frames: list[Frame] | None = None
    is_main, collective = False, None
    for line in dump.splitlines():
        if _STACK.match(line):
            frames, is_main = [], True
        elif line.startswith(COLLECTIVE):
            with suppress(ValueError):  # The line is incomplete.
                found = json.loads(line.removeprefix(COLLECTIVE))
                collective = found and Collective(**found)
        elif frames is not None and is_main and (frame := _FRAME.match(line)):
            is_main = not _OURS.search(frame[1])  # Frames below the script's are those of its launcher.
            frames += [Frame(frame[1], int(frame[2]), frame[3])] if is_main else []
    return None if frames is None else RankStack(rank, node, tuple(frames), collective)


def groups(ranks: tuple[RankStack, ...]) -> list[tuple[list[int], RankStack]]:
    """Group the ranks by place, each group with the stack of one of them; smallest groups first."""
    found: dict[tuple[tuple[Frame, ...], Collective | None], list[RankStack]] = {}
    for each in ranks:
        found.setdefault((each.frames, each.collective), []).append(each)
    grouped = [([each.rank for each in same], same[0]) for same in found.values()]
    return sorted(grouped, key=lambda group: (len(group[0]), group[0]))
