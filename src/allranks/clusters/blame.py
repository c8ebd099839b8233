"""Which rank ended a run, and why: one that failed by itself, and not one that lost its connection to it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from allranks import contract
from allranks.job.units import format_size
from allranks.processes import rank_ended
from allranks.runs import record
from allranks.runs.cause import cause_of, find_cause
from allranks.runs.events import read_events
from allranks.runs.status import State, Status

#: What ranks say that another one has left alone, over gloo, NCCL, torch's store and our runtime, or that are ended.
_VICTIM = re.compile(
    r"[Cc]onnection (?:was )?(?:closed|reset|refused)|Broken pipe|failed to recv|NCCL communicator was aborted"
    r"|remote process exited|ncclRemoteError|Watchdog caught collective|Timed out waiting|wait timeout after"
    r"|rank 0 ended while rank|killed by signal: Terminated|KeyboardInterrupt"
)
_ASKED_TO_END = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


@dataclass(frozen=True)
class _End:
    """A rank's end, as its node's agent noted it.

    Attributes:
        code: as Python tells it, negative for a signal.
        memory: the bytes that it held at most, and could hold at most, if it was killed.
    """

    folder: Path
    host: str
    restart: int
    rank: int
    code: int
    time: float
    memory: tuple[int | None, int | None]

    @property
    def cause(self) -> str | None:
        """What it says itself: the exception that ended its script, else what is on stderr since the last restart."""
        if found := self._recorded(self.restart):
            return found
        said = cause_of(self.folder / contract.rank_log(self.rank, "err"))
        return None if said in map(self._recorded, range(self.restart)) else said

    def _recorded(self, restart: int) -> str | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            told = json.loads((self.folder / contract.rank_error(self.rank, restart)).read_text())
            return find_cause(told["message"]["extraInfo"]["py_callstack"].splitlines())
        return None


def with_cause(status: Status, attempt: Path, stop_timeout: float, restart: int | None = None) -> Status:
    """Return the status of a run that a rank has ended with the cause of it.

    The first rank that failed may have lost its connection to one that takes longer to end: then that one is named.

    Args:
        status: it names the rank that ended first, and not well.
        attempt: the attempt's folder.
        stop_timeout: ranks are killed if they have not left so many seconds after another one has failed.
        restart: the generation of ranks that the rank has ended; None for the last one.
    """
    assert status.rank is not None
    ends = [*_ends(attempt, restart)]
    first = next((end for end in ends if end.rank == status.rank), None)
    log = rank_log(attempt, status.rank)
    cause = first.cause if first else cause_of(log) if log else None
    if first and cause and _VICTIM.search(cause):
        others = [end for end in ends if _failed_itself(end, first, stop_timeout)]
        if others:
            first = min(others, key=lambda end: end.time)
            status, cause = replace(status, rank=first.rank, reason=_reason(first, attempt)), first.cause
    is_killed = first.code == -signal.SIGKILL if first else status.exit_code == 128 + signal.SIGKILL
    return replace(status, cause=_killed(first, cause) if is_killed else cause)


def restart_cause(attempt: Path, rank: int, restart: int) -> str:
    """Say in a line which rank's failure has ended a generation of ranks that is started again, and why it failed.

    Args:
        attempt: the attempt's folder.
        rank: the rank that failed first.
        restart: the generation.
    """
    stop_timeout = record.load(attempt.parents[1]).record.stop_timeout
    found = with_cause(Status(State.RUNNING, rank=rank), attempt, stop_timeout, restart)
    end = next((end for end in _ends(attempt, restart) if end.rank == found.rank), None)
    how = _reason(end, attempt) if end and not (end.code > 0 and found.cause) else f"rank {found.rank} failed"
    return f"{how}: {found.cause}" if found.cause else how


def rank_log(attempt: Path, rank: int) -> Path | None:
    """Return what a rank wrote to stderr, on the node that had it last: another may have taken a lost one's place."""
    logs = attempt.glob(f"*/{contract.rank_log(rank, 'err')}")
    return max(logs, key=lambda log: (log.stat().st_mtime, log), default=None)


def _ends(attempt: Path, restart: int | None = None) -> Iterator[_End]:
    """Yield the ends of a generation's ranks, of the last by default; nodes that were lost before have seen others."""
    found = []
    for folder in attempt.glob("node-*"):
        current = 0
        for event in read_events(folder / contract.AGENT_EVENTS):
            if event.kind == contract.RANKS_STARTED:
                current = event.fields["restart"]
            elif event.kind == contract.RANK_EXITED and event.rank is not None:
                memory = (event.fields.get("memory"), event.fields.get("memory_limit"))
                code, time = event.fields["code"], event.fields["ended"]
                found.append(_End(folder, event.host, current, event.rank, code, time, memory))
    wanted = max((end.restart for end in found), default=0) if restart is None else restart
    yield from (end for end in found if end.restart == wanted)


def _failed_itself(end: _End, first: _End, stop_timeout: float) -> bool:
    """Tell whether a rank that ended later did so of itself: neither because others had, nor because it was told to."""
    if end.rank == first.rank or end.code in (0, contract.CONTINUE_LATER):
        return False
    if cause := end.cause:
        return not _VICTIM.search(cause)
    is_late = end.time - first.time >= stop_timeout
    return end.code < 0 and end.code not in _ASKED_TO_END and not (end.code == -signal.SIGKILL and is_late)


def _reason(end: _End, attempt: Path) -> str:
    """Say how a rank ended; one that was told to leave before it had come to its end has failed all the same."""
    host = end.host if len([*attempt.glob("node-*")]) > 1 else None
    at = f" on {host}" if host else ""
    return f"rank {end.rank}{at} failed" if end.code in _ASKED_TO_END else rank_ended(end.rank, end.code, host)


def _killed(end: _End | None, said: str | None) -> str:
    """Say why a rank may have been killed: who kills it for its memory tells the rank nothing."""
    held, limit = end.memory if end else (None, None)
    used = f": it used {format_size(held)} at most" if held else ""
    most = f", the limit of its node is {format_size(limit)}" if used and limit else ""
    return f"memory may have run out{used}{most}" + (f"; its last words: {said}" if said else "")
