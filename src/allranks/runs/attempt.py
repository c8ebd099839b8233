"""What the jobs and tasks of a run's attempt have left in its directory: ids, exit codes, decisions."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.logs.cause import tail
from allranks.runs.record import newest_attempt
from allranks.system.processes import rank_ended

#: More than any log of ours that is read to its end.
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class Failure:
    """How a rank ended that no agent watched, as its scheduler reports it or its task has written itself."""

    rank: int | None  # The global rank, the lowest of those that ended alike at the same time; None for an agent.
    host: str | None  # Its node, if that is known.
    code: int  # As Python has it, negative for a signal.
    out_of_memory: bool = False  # Whether the scheduler says that memory ran out.
    time: float = 0.0  # When, by the clock of the file's server, if its task has written it.
    folder: Path = Path()  # Of its node, likewise.

    def in_words(self, *, with_host: bool) -> str:
        """Say it as agents do."""
        text = rank_ended(self.rank or 0, self.code, self.host if with_host else None)
        return f"{text}: it ran out of memory" if self.out_of_memory else text


def newest(folder: Path) -> Path:
    """Return the directory of a run's newest attempt."""
    return folder / contract.attempt_dir(newest_attempt(folder))


def current_job(folder: Path, first: str) -> str:
    """Return the id of the job that a run is now: of its newest attempt, or of the one that was queued after it.

    Args:
        folder: the run's.
        first: the job that was submitted, with its cluster if Slurm named one: a job itself does not know that.
    """
    attempt = newest(folder)
    found = str(decision_after(attempt).get("job") or "")
    with contextlib.suppress(OSError):
        found = found or (attempt / contract.JOB).read_text().strip()
    _, separator, cluster = first.partition(";")
    return f"{found}{separator}{cluster}" if found else first


def decision_after(attempt: Path) -> dict[str, Any]:
    """Return what was decided at the end of an attempt; empty before that."""
    return read_json(attempt / contract.AGAIN)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


def exit_of(attempt: Path) -> tuple[int, float] | None:
    """Return the exit code of an attempt's script, and when it exited; None while it runs."""
    with contextlib.suppress(OSError, ValueError):
        path = attempt / contract.EXIT
        return int(path.read_text()), path.stat().st_mtime
    return None


def lines_of(log: Path) -> list[str]:
    """Return the newest attempt's last lines of a log that are not blank; none if it is not there."""
    lines = list[str]()
    for line in tail(log, most=_TAIL_BYTES):
        if line.endswith(contract.ATTEMPT_STARTS):  # What the attempt before wrote last may be half a line.
            lines.clear()
        elif line.strip():
            lines.append(line)
    return lines


def first_failure(attempt: Path) -> Failure | None:
    """Return how the task ended that failed first, by what tasks have written themselves; None if none has."""
    failed = []
    for path in attempt.glob(f"node-*/*{contract.TASK_EXIT}"):
        with contextlib.suppress(OSError, ValueError):
            text, host = path.read_text().split()
            code = int(text) if int(text) <= 128 else 128 - int(text)
            rank = int(found[1]) if (found := re.match(r"rank-(\d+)", path.name)) else None
            end = Failure(rank, host, code, time=path.stat().st_mtime, folder=path.parent)
            failed += [end] if code else []
    if any(end.code == contract.CONTINUE_LATER for end in failed):  # Then others are ended with these two.
        of_others = (contract.CONTINUE_LATER, -signal.SIGTERM, -signal.SIGKILL)
        failed = [end for end in failed if end.code not in of_others]
    return min(failed, key=lambda end: (end.time, end.rank or 0), default=None)
