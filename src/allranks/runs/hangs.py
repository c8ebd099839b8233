"""Hangs that agents have recorded: where the ranks are, which ones the others wait for, and what to do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.job.units import format_size
from allranks.logs.cause import is_foreign
from allranks.logs.lineform import ranges
from allranks.record.events import Event, read_events
from allranks.record.stacks import Collective

#: Files of torch's collectives, and of debuggers, which wait for input.
_COLLECTIVE = re.compile(r"/torch/distributed/distributed_c10d\.py$")
_DEBUGGER = re.compile(r"/(?:pdb|bdb|cmd)\.py$|/(?:debugpy|ipdb|pudb|IPython)/")
#: Files that an interpreter runs after the script.
_EXIT = re.compile(r"/threading\.py$|/concurrent/futures/\w+\.py$|/multiprocessing/util\.py$")
#: Calls that wait for other ranks inside C++, which frames do not show.
_BACKWARD = re.compile(r"/torch/autograd/graph\.py$")
#: Seconds without progress after which that is shown, and after which a reported hang is looked up.
_SHOWN_AFTER, _LOOKED_UP_AFTER = contract.scaled_wait(60.0), 5.0
#: Most seconds between the last output of hanging ranks and the end of the attempt.
_LAST_WORDS = 120.0
#: Collectives whose tensors have the same size on all ranks.
_EQUAL_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce")
_FOLLOWS = {"restart": "all ranks restart", "end": "the run ends"}


def span(seconds: float) -> str:
    """Format a duration as ``45 s``, ``5 min`` or ``2.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def named_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as ``rank 3`` or ``ranks 0,2-3``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def named(collective: Collective) -> str:
    """Format a collective as ``all_reduce #4812 (33 MB)``, with its process group unless that has all ranks."""
    group = f", process group {collective.group}" if collective.group != "0" else ""
    size = format_size(collective.bytes) if collective.bytes else ""
    more = f"{size}{group}".removeprefix(", ")
    return f"{collective.name} #{collective.number}" + (f" ({more})" if more else "")


@dataclass(frozen=True)
class Group:
    """Ranks at the same place.

    Attributes:
        ranks: the ranks.
        frames: file, line and function, innermost first; empty if unknown.
        stack: ``shown``; ``late``: no answer to the request; ``none``: they cannot write it.
        state: ``stopped`` by a signal, ``traced`` by a debugger, ``held`` by the kernel in an uninterruptible call; ""
           for all others.
        pending: the collective that they have started and not completed, if torch recorded one.
    """

    ranks: tuple[int, ...]
    frames: tuple[tuple[str, int, str], ...]
    stack: str
    state: str = ""
    pending: Collective | None = None

    @property
    def named(self) -> str:
        """The ranks as text."""
        return named_ranks(self.ranks)

    @cached_property
    def users(self) -> tuple[str, int, str] | None:
        """The innermost frame in the user's code."""
        return next((frame for frame in self.frames if not is_foreign(frame[0])), None)

    @cached_property
    def collective(self) -> str | None:
        """The collective that they are in."""
        return next((name for file, _, name in reversed(self.frames) if _COLLECTIVE.search(file)), None)

    @cached_property
    def kind(self) -> str:
        """What they do: stopped, held, late, unknown, debugger, collective, exit, or code for a place in the script."""
        if self.state:
            return "debugger" if self.state == "traced" else self.state
        if self.stack != "shown":
            return "late" if self.stack == "late" else "unknown"
        if any(_DEBUGGER.search(file) for file, _, _ in self.frames):
            return "debugger"
        if self.collective:
            return "collective"
        if not self.users and (not self.frames or _EXIT.search(self.frames[-1][0])):
            return "exit"
        return "code"

    @property
    def waits(self) -> bool:
        """Whether they wait in a collective; with NCCL a rank waits at the next line that needs the result."""
        return self.kind == "collective" or (self.kind == "code" and self.pending is not None)

    @property
    def place(self) -> str:
        """Their place: ``train.py:88``."""
        frame = self.users or (self.frames[0] if self.frames else None)
        return f"{Path(frame[0]).name}:{frame[1]}" if frame else ""

    @property
    def phrase(self) -> str:
        """What they do, as a sentence."""
        is_one = len(self.ranks) == 1
        be = "is" if is_one else "are"
        at = f" at {self.place}" if self.place else ""
        match self.kind:
            case "stopped":
                return f"{self.named} {be} stopped (SIGSTOP){at}"
            case "held":
                return f"{self.named} wait{'s' if is_one else ''} for a disk or file server{at and ', ' + at[1:]}"
            case "late":
                return f"{self.named} did not react, in code that is not Python"
            case "unknown":
                return f"{self.named} cannot show where {'it stands' if is_one else 'they stand'}"
            case "debugger":
                return f"{self.named} {be} in a debugger{at}"
            case "collective":
                return f"{self.named} wait{'s' if is_one else ''} in {self._named_collective}{at}"
            case "exit":
                return f"{self.named} {be} at the exit of the interpreter"
        pending = f", with {named(self.pending)} pending" if self.pending else ""
        if any(_BACKWARD.search(file) for file, _, _ in self.frames):
            return f"{self.named} {be} in backward{at}{pending}"
        frame = self.users or self.frames[0]
        where = "" if frame[2] == "<module>" else f" in {frame[2]}"
        return f"{self.named} {be}{where}{at}{pending}"

    @property
    def _named_collective(self) -> str:
        if not self.pending:
            return str(self.collective)
        # torch's record may have another name: a backend may build a collective from others, or wait for an older one.
        is_it = self.pending.name == self.collective
        return named(self.pending) if is_it else f"{self.collective} (pending: {named(self.pending)})"


@dataclass(frozen=True)
class Hang:
    """A hang: no rank advanced.

    Attributes:
        time: when it was recorded, in seconds since 1970.
        since: when a rank last advanced.
        groups: of ranks at the same place, the largest first.
        left: ranks that had exited, without an error.
        action: what followed: ``report``, ``restart`` or ``end``.
    """

    time: float
    since: float
    groups: tuple[Group, ...]
    left: tuple[int, ...]
    action: str

    @cached_property
    def odd(self) -> Group | None:
        """The ranks that the others wait for, if known: the smallest group that is not in a collective."""
        if stuck := [group for group in self.groups if group.kind in ("debugger", "stopped", "held")]:
            return stuck[0]
        others = [group for group in self.groups if not group.waits]
        others = others or [group for group in self.groups if group.kind != "collective"]
        others.sort(key=lambda each: len(each.ranks))
        is_tied = len(others) > 1 and len(others[0].ranks) == len(others[1].ranks)
        return others[0] if others and not is_tied else None

    @property
    def kind(self) -> str:
        """The class of the hang: ``hang``, or a more specific one such as ``hang-in-debugger``."""
        kinds = {group.kind for group in self.groups}
        if "debugger" in kinds:
            return "hang-in-debugger"
        if "stopped" in kinds:
            return "hang-stopped"
        if "held" in kinds:
            return "hang-in-kernel"
        if self.mismatch:
            return "hang-mismatch"
        if kinds == {"collective"} and self.left:
            return "hang-rank-left"
        if "exit" in kinds:
            return "hang-at-exit"
        return "hang"

    @property
    def mismatch(self) -> str | None:
        """How the collectives differ if all ranks wait in one; None if they are equal, or if a rank waits in none."""
        if not all(group.waits for group in self.groups):
            return None
        recorded: dict[tuple[str, int], list[Collective]] = {}
        for each in (group.pending for group in self.groups if group.pending):
            recorded.setdefault((each.group, each.number), []).append(each)
        for same in recorded.values():
            if len({each.name for each in same}) > 1:
                return "they are in different collectives"
            if same[0].name in _EQUAL_SIZES and len({each.bytes for each in same}) > 1:
                return "the sizes of their tensors differ"
        are_collectives = all(group.kind == "collective" for group in self.groups) and not self.left
        if are_collectives and len({(group.collective, group.place) for group in self.groups}) > 1:
            return "they are in different collectives"
        return None

    @property
    def sentence(self) -> str:
        """Where the ranks are, in one sentence."""
        parts = [group.phrase for group in self.groups]
        if self.left:
            parts.append(f"{named_ranks(self.left)} exited without an error")
        if self.kind == "hang-mismatch" and self.mismatch:
            parts.append(self.mismatch)
        return "; ".join(parts)

    @property
    def notice(self) -> str:
        """The line to show when the hang is detected."""
        follows = f"; {_FOLLOWS[self.action]}" if self.action in _FOLLOWS else ""
        return f"no rank has advanced for {span(self.time - self.since)}: {self.sentence}{follows}"


def of_event(event: Event) -> Hang:
    """Return the hang that an event reports."""
    fields: Mapping[str, Any] = event.fields
    groups = tuple(
        Group(
            tuple(group["ranks"]),
            tuple((f, n, name) for f, n, name in group["frames"]),
            group["stack"],
            group.get("state", ""),
            Collective(**pending) if (pending := group.get("collective")) else None,
        )
        for group in fields["groups"]
    )
    return Hang(event.time, fields["since"], groups, tuple(fields["left"]), fields["action"])


def newest(attempt: Path) -> Hang | None:
    """Return the hang that an attempt is in, or in which it ended; None if ranks have advanced since the last one.

    Output of ranks that exit because of a timeout or signal is not progress.
    """
    for folder in sorted(attempt.glob("node-*")):
        found, over, has_ended = None, None, False
        for event in read_events(folder / contract.AGENT_EVENTS):
            if event.kind == contract.HANG:
                found, over = of_event(event), None
            elif event.kind == contract.HANG_OVER:
                over = event.time
            elif event.kind == contract.RANKS_STARTED or (
                event.kind == contract.ENDED and over and event.time - over > _LAST_WORDS
            ):
                found = over = None
            has_ended = event.kind == contract.ENDED
        if found and (over is None or has_ended):
            return found
    return None


def quiet_for(attempt: Path) -> float | None:
    """Return the seconds since a rank last advanced if that is long enough to be shown, else None."""
    times = []
    for path in attempt.glob(f"node-*/{contract.USAGE}"):
        try:
            times.append(float(json.loads(path.read_text())["advanced"]))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # Being written, or of another version.
    quiet = time.time() - max(times, default=time.time())
    if quiet >= _SHOWN_AFTER or (quiet >= _LOOKED_UP_AFTER and newest(attempt)):
        return quiet
    return None


def halted(attempt: Path) -> str:
    """Return for how long no rank has advanced, and where they are if that is known; empty if they advance."""
    if (quiet := quiet_for(attempt)) is None:
        return ""
    hang = newest(attempt)
    return f"no step for {span(quiet)}" + (f": {hang.sentence}" if hang else "")


#: The line to show when a hang is over.
OVER = "the ranks advance again"
