"""Finds the rank that ended a run, and why: the one that failed first, not one that lost its connection to it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from allranks import contract
from allranks.job.units import format_size
from allranks.logs.cause import cause_of, find_cause
from allranks.record.events import read_events
from allranks.runs import record
from allranks.runs.status import State, Status
from allranks.system.processes import rank_ended

#: Errors in a collective that another rank does not take part in.
_ALONE = (
    r"Connection closed by peer \[|remote process exited|ncclRemoteError|Watchdog caught collective|failed to recv"
    r"|Timed out waiting \d+ ?ms"
)
#: Errors of ranks whose peer died (gloo, NCCL, torch's store, our runtime), and of ranks that were stopped.
_VICTIM = re.compile(
    rf"{_ALONE}|[Cc]onnection (?:was )?(?:closed|reset|refused)|Broken pipe|NCCL communicator was aborted"
    r"|Timed out waiting|wait timeout after|rank 0 ended while rank|killed by signal: Terminated|KeyboardInterrupt"
)
_TIMED_OUT = re.compile(r"Watchdog caught collective|Timed out waiting \d+ ?ms")
_STOP_SIGNALS = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


@dataclass(frozen=True)
class _End:
    """A rank's exit, as its node's agent recorded it.

    Attributes:
        code: as Python reports it, negative for a signal.
        memory: if it was killed, its peak memory and its memory limit in bytes.
        facts: the node's facts about the failure, if it was the first one there.
    """

    folder: Path
    host: str
    restart: int
    rank: int
    code: int
    time: float
    memory: tuple[int | None, int | None]
    facts: list[str] = field(default_factory=list)

    @property
    def cause(self) -> str | None:
        """The exception that ended its script, else the cause from stderr since the last restart.

        Of a rank that was stopped, words that are no exception tell only how far it had come.
        """
        if found := self._recorded(self.restart):
            return found
        said = cause_of(self.folder / contract.rank_log(self.rank, "err"), is_any=self.code not in _STOP_SIGNALS)
        return None if said in map(self._recorded, range(self.restart)) else said

    @property
    def exit_message(self) -> str | None:
        """The text that its script passed to ``sys.exit``: a record of one line, without a traceback."""
        text = self._record(self.restart).rstrip()
        return text if text and "\n" not in text else None

    def _recorded(self, restart: int) -> str | None:
        return find_cause(self._record(restart).splitlines())

    def _record(self, restart: int) -> str:
        """Return the message of its error file, in the format of torch's ``@record``; empty if there is none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            error = json.loads((self.folder / contract.rank_error(self.rank, restart)).read_text())
            return str(error["message"]["extraInfo"]["py_callstack"])
        return ""


def with_cause(status: Status, attempt: Path, stop_timeout: float, restart: int | None = None) -> Status:
    """Add the cause to the status of a run that a rank has ended.

    The rank that exited first may only have lost its connection to one that took longer to exit: then that is named.

    Args:
        status: the status, with the rank that failed first.
        attempt: directory of the attempt.
        stop_timeout: seconds between the failure of a rank and SIGKILL for the others.
        restart: the generation that the rank has ended; None for the last one.
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
            status, cause = status._replace(rank=first.rank, reason=_reason(first, attempt)), first.cause
        elif re.search(_ALONE, cause):
            cause = _why_alone(first, cause, ends)
    is_killed = first.code == -signal.SIGKILL if first else status.exit_code == 128 + signal.SIGKILL
    if is_killed:  # A rank killed for its memory use leaves no error.
        cause = _why_killed(first) + (f"; its last words: {cause}" if cause else "")
    return status._replace(cause=cause)


def _why_alone(first: _End, cause: str, ends: list[_End]) -> str:
    """Name the rank for which this one was in a collective in vain; return the cause as it is if none is found."""
    found = re.search(r" \([^()]*:\d+\)$", cause)
    place = found[0] if found else ""
    if done := [end for end in ends if end.code == 0 and end.time < first.time]:
        rank = min(done, key=lambda end: end.time).rank
        return f"rank {rank} exited with code 0 while rank {first.rank} was in a collective{place}"
    # Ranks that waited as well say that they timed out, or lost this one: of several others none may be the late one.
    silent = [end.rank for end in ends if end.code in (*_STOP_SIGNALS, -signal.SIGKILL) and not end.cause]
    if len(silent) == 1 and _TIMED_OUT.search(cause):
        return f"rank {silent[0]} was still running when a collective of rank {first.rank} timed out{place}"
    return cause


def _why_killed(end: _End | None) -> str:
    facts = "\n".join(end.facts) if end else ""
    if "oom_kill did not grow" in facts:
        return "the kernel did not kill it for its memory: a person, a scheduler or another program did"
    held, limit = end.memory if end else (None, None)
    used = f": it used {format_size(held)} at most" if held else ""
    used += f", the limit of its node is {format_size(limit)}" if used and limit else ""
    return f"memory {'ran out' if 'oom_kill grew' in facts else 'may have run out'}{used}"


def restart_cause(attempt: Path, rank: int, restart: int) -> str:
    """Return a line that names the rank whose failure ended a generation, and why; ``rank`` exited first."""
    stop_timeout = record.load(attempt.parents[1]).record.stop_timeout
    found = with_cause(Status(State.RUNNING, rank=rank), attempt, stop_timeout, restart)
    end = next((end for end in _ends(attempt, restart) if end.rank == found.rank), None)
    how = _reason(end, attempt) if end and not (end.code > 0 and found.cause) else f"rank {found.rank} failed"
    return f"{how}: {found.cause}" if found.cause else how


def exit_message(attempt: Path, rank: int | None) -> str | None:
    """Return the text that a rank's script passed to ``sys.exit``; None if it exited otherwise."""
    return next((end.exit_message for end in _ends(attempt) if end.rank == rank), None)


def rank_log(attempt: Path, rank: int) -> Path | None:
    """Return the path of a rank's stderr on its last node: a spare may have replaced a lost node."""
    logs = attempt.glob(f"*/{contract.rank_log(rank, 'err')}")
    return max(logs, key=lambda log: (log.stat().st_mtime, log), default=None)


def _ends(attempt: Path, restart: int | None = None) -> Iterator[_End]:
    """Yield the exits of a generation's ranks, by default the last one; nodes lost before it have older ones."""
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
            elif event.kind == contract.NODE_FACTS and event.rank is not None and found:
                found[-1].facts.extend(event.fields["lines"])
    wanted = max((end.restart for end in found), default=0) if restart is None else restart
    yield from (end for end in found if end.restart == wanted)


def _failed_itself(end: _End, first: _End, stop_timeout: float) -> bool:
    """Return True if a rank that exited later failed independently: not because of the others, nor on request."""
    if end.rank == first.rank or end.code in (0, contract.CONTINUE_LATER):
        return False
    if cause := end.cause:
        return not _VICTIM.search(cause)
    is_late = end.time - first.time >= stop_timeout
    return end.code < 0 and end.code not in _STOP_SIGNALS and not (end.code == -signal.SIGKILL and is_late)


def _reason(end: _End, attempt: Path) -> str:
    """Return how a rank exited; one that was stopped before it finished counts as failed."""
    host = end.host if len([*attempt.glob("node-*")]) > 1 else None
    at = f" on {host}" if host else ""
    return f"rank {end.rank}{at} failed" if end.code in _STOP_SIGNALS else rank_ended(end.rank, end.code, host)
