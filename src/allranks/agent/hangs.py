"""Hang detection: whether the ranks of this node have stopped advancing, where they are, and what follows.

A rank advances when it prints, or when it makes a step or takes a batch with allranks' runtime, which counts both in a
file. If no rank has advanced for too long, the agent samples their stacks several times: a training may advance without
output, and then all its ranks move. In a hang at least one rank stays at the same place.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.agent.stacks import request
from allranks.record.logindex import LogIndexWriter
from allranks.record.spec import NodeSpec
from allranks.record.stacks import Collective, Frame, parse
from allranks.system.processes import stuck_state

#: The default timeout: this many usual steps, but at least this many seconds.
_USUAL_STEPS = 10
_LEAST_SECONDS = contract.scaled_wait(300.0)
#: The usual step is the median of this many gaps between signs of progress.
_GAPS = 64
_LOOK_SECONDS = contract.scaled_wait(1.0)
#: Number of stack samples, and the seconds between them.
_SAMPLES = 5
_SAMPLE_SECONDS = contract.scaled_wait(5.0)
#: Innermost frames of a stack to keep.
_FRAMES = 48
#: Most groups of ranks in a report, and the frames kept of each if there were more.
_GROUPS, _FEW_FRAMES = 32, 4
#: How long before the time limit a hang ends a run that no terminal follows.
_NEAR_SECONDS = contract.scaled_wait(300.0)

#: A node's report of ranks that do not advance: since when (seconds since 1970), whether all of them move, the ranks
#: grouped by place, and the ranks that have exited.
Quiet = dict[str, Any]


class _Stand:
    """The stack samples of one rank."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start  # Sizes of its stack file before the first request and the last one, in bytes.
        self.frames: tuple[Frame, ...] = ()  # Of the newest stack, innermost first.
        self.places = set[tuple[tuple[str, str], ...]]()  # The functions of each stack.
        self.stack = "none"  # "shown"; "late": not answered yet; "none": the rank cannot write its stack.
        self.collective: Collective | None = None  # Pending in the newest answer, which may come after the stack.


class HangWatch:
    """Watches the ranks of this node."""

    def __init__(self, node: NodeSpec, folder: Path, index: LogIndexWriter) -> None:
        self.quiet: Quiet | None = None  # The report while no rank has advanced for too long.
        self.advanced: float | None = None  # When a rank last advanced, in seconds since 1970; None before the start.
        self._timeout, self._node, self._folder, self._index = node.hang_timeout, node.node, folder, index
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._pids: dict[int, int] = {}
        self._steps: dict[int, int] = {}  # descriptors of the files in which ranks count, by rank
        self._sign: tuple[int, ...] = ()
        self._since = self._next = 0.0
        self._moved = 0.0  # when all ranks were seen to move in silence
        self._stands: dict[int, _Stand] = {}
        self._samples = 0

    def start(self, pids: Mapping[int, int]) -> None:
        """Watch a new generation; ``pids`` maps global ranks to process ids."""
        self._pids = dict(pids)
        for descriptor in self._steps.values():
            os.close(descriptor)
        self._steps = {}
        self._gaps.clear()
        self._note_advance(time.monotonic())

    def tick(self, alive: Collection[int]) -> None:
        """Check about once a second whether ranks have advanced; ``alive`` holds the process ids of living ranks."""
        if (now := time.monotonic()) < self._next or self._timeout == 0 or not alive:
            return
        self._next = now + (_SAMPLE_SECONDS if self._stands else _LOOK_SECONDS)
        if (sign := self._newest_sign(len(alive))) != self._sign:
            self._sign = sign
            self._gaps.append(now - self._since)
            self._note_advance(now)
        elif self._stands:
            self._sample(alive)
        elif (self.quiet is None or self.quiet["moving"]) and now - max(self._since, self._moved) >= self._limit:
            self._samples = 0
            self._request_stacks(alive)
            self._next = now + _SAMPLE_SECONDS

    @property
    def _limit(self) -> float:
        if self._timeout is not None:
            return self._timeout
        usual = sorted(self._gaps)[len(self._gaps) // 2] if self._gaps else 0.0
        return max(_LEAST_SECONDS, _USUAL_STEPS * usual)

    def _note_advance(self, now: float) -> None:
        self._since, self._moved, self.advanced = now, 0.0, time.time()
        self._stands = {}
        self.quiet = None

    def _newest_sign(self, alive: int) -> tuple[int, ...]:
        """Return values that change when a rank advances: log sizes, number of living ranks, counted steps."""
        for rank in self._pids.keys() - self._steps.keys():
            with suppress(OSError):  # The rank does not use the runtime, or not yet.
                path = self._folder / contract.rank_step(rank)
                self._steps[rank] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        counts = (os.pread(descriptor, 8, 0) for descriptor in self._steps.values())
        return (self._index.growths, alive, *(int.from_bytes(count, "little") for count in counts))

    # --- stack samples ---

    def _living(self, alive: Collection[int]) -> dict[int, int]:
        return {rank: pid for rank, pid in self._pids.items() if pid in alive}

    def _request_stacks(self, alive: Collection[int]) -> None:
        living = self._living(alive)
        for rank in living:
            size = 0
            with suppress(OSError):
                size = (self._folder / contract.rank_stacks(rank)).stat().st_size
            self._stands.setdefault(rank, _Stand(size)).end = size
        able = {*request(living.values())}
        for rank, pid in living.items():
            self._stands[rank].stack = "late" if pid in able else "none"

    def _sample(self, alive: Collection[int]) -> None:
        """Read the requested stacks; request another sample, or conclude after the last one."""
        for rank, stand in self._stands.items():
            if stand.stack == "late" and (found := parse(self._dump(rank, stand.end), rank, self._node)):
                stand.frames, stand.stack = found.frames[:_FRAMES], "shown"
                answers = parse(self._dump(rank, stand.start), rank, self._node)
                stand.collective = answers.collective if answers else None
                stand.places.add(tuple((frame.file, frame.function) for frame in stand.frames))
        self._samples += 1
        moving = all(len(stand.places) > 1 for stand in self._stands.values())
        if not moving and self._samples < _SAMPLES:
            self._request_stacks(alive)
            return
        if moving:
            self._moved = time.monotonic()
        living = self._living(alive)
        self.quiet = {
            "since": self.advanced,
            "moving": moving,
            "groups": merged([_group(rank, stand, living.get(rank)) for rank, stand in self._stands.items()]),
            "left": sorted(self._pids.keys() - living.keys()),
        }
        self._stands = {}

    def _dump(self, rank: int, start: int) -> str:
        try:
            with open(self._folder / contract.rank_stacks(rank), "rb") as stream:
                stream.seek(start)
                return stream.read().decode(errors="replace")
        except OSError:
            return ""


def _group(rank: int, stand: _Stand, pid: int | None) -> dict[str, Any]:
    frames = [[frame.file, frame.line, frame.function] for frame in stand.frames]
    return {
        "ranks": [rank],
        "frames": frames,
        "stack": stand.stack,
        "state": stuck_state(pid) if pid else "",
        "collective": stand.collective and stand.collective._asdict(),
    }


def merged(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge groups at the same place; return them, the largest first."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        place = repr([group[key] for key in ("frames", "stack", "state", "collective")])
        same = found.setdefault(place, {**group, "ranks": []})
        same["ranks"] = sorted([*same["ranks"], *group["ranks"]])
    sized = sorted(found.values(), key=lambda group: (-len(group["ranks"]), group["ranks"]))
    if len(sized) <= _GROUPS:
        return sized
    # If every rank is at another place, the report must still fit a message between agents: at most 1 MiB.
    if any(len(group["frames"]) > _FEW_FRAMES for group in sized):
        return merged({**group, "frames": group["frames"][:_FEW_FRAMES]} for group in sized)
    others = sorted(rank for group in sized[_GROUPS:] for rank in group["ranks"])
    return [*sized[:_GROUPS], {"ranks": others, "frames": [], "stack": "none", "state": "", "collective": None}]


class HangJudge:
    """Decides for all nodes of a generation whether it hangs, and what follows."""

    def __init__(self, node: NodeSpec) -> None:
        self.hang: dict[str, Any] | None = None  # The recorded hang; None while ranks advance.
        self._policy = node.on_hang
        self._end_time = float(os.environ.get(contract.END_TIME) or 0)
        self._is_watched = bool(os.environ.get(contract.TERMINAL))

    def judge(self, reports: Sequence[Quiet | None], left: Collection[int] = ()) -> tuple[str, dict[str, Any]] | None:
        """Return an event and its fields if a hang begins or ends by the ``reports`` of nodes with living ranks.

        ``left`` are the ranks of nodes on which all ranks have exited.
        """
        if not reports:
            return None
        quiet = [report for report in reports if report]
        if len(quiet) < len(reports) or all(report["moving"] for report in quiet):
            if self.hang is None:
                return None
            over = {"since": self.hang["since"]}
            self.hang = None
            return contract.HANG_OVER, over
        if self.hang:
            return None
        since = max(report["since"] for report in quiet)
        self.hang = {
            "since": since,
            "quiet": round(time.time() - since, 1),
            "groups": merged(group for report in quiet for group in report["groups"]),
            "left": sorted({*left, *(rank for report in quiet for rank in report["left"])}),
            "action": self.action,
        }
        return contract.HANG, self.hang

    @property
    def action(self) -> str:
        """What follows a hang now: ``report``, ``restart`` or ``end``."""
        if self._policy:
            return self._policy
        is_near = bool(self._end_time) and time.time() >= self._end_time - _NEAR_SECONDS
        return "end" if is_near and not self._is_watched else "report"

    @property
    def why(self) -> str:
        """The reason to record when a hang ends the run."""
        assert self.hang
        near = "" if self._policy else ": the time limit is near, and no terminal follows the run"
        return f"the ranks hang: none has advanced for {time.time() - self.hang['since']:.0f} s{near}"
