"""What a job leaves in the run's directory: which job the run is now, what was decided, and logs."""

from __future__ import annotations

import contextlib
import glob
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.clusters.batch.scheduler import Failure
from allranks.logs.cause import tail
from allranks.runs import agents
from allranks.runs.record import newest_attempt
from allranks.runs.status import LogExcerpt

if TYPE_CHECKING:
    from allranks.clusters.batch.scheduler import Scheduler
    from allranks.runs.record import Run

#: More than any log of ours that is read to its end.
_TAIL_BYTES = 1 << 20
#: Tells no cause in any log: what bash prints of a signal, and what agents and the supervisor print besides.
_NOISE = re.compile(r"Terminated$|(?:allranks: )?(?:node \d+: )?[A-Z_]+=\S*: |allranks: (?:an|no )other attempt")


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


def logs_of(scheduler: Scheduler, folder: Path, job_id: str) -> list[Path]:
    """Return the logs of a run's job that have text in them: of its script, and of the scheduler itself."""
    requested = {
        reason["subject"]: reason["value"] for reason in read_json(folder / contract.PLAN_FILE).get("reasons", ())
    }
    patterns = [glob.escape(requested[name]) for name in ("scheduler.error", "scheduler.output") if name in requested]
    patterns += scheduler.logs(glob.escape(str(folder)), job_id, requested)
    return [log for pattern in patterns for log in _with_text(pattern)]


def excerpt_of(scheduler: Scheduler, run: Run) -> LogExcerpt:
    """Find what may tell why a run's newest attempt ended: in its job's logs, or in the log of a node.

    That is at most two lines of the first log that has such a line; else the last line. What was in a log before the
    attempt does not count.
    """
    logs = logs_of(scheduler, run.folder, run.job_id or "")
    if first := first_failure(run.attempt_folder):
        logs.append(first.folder / contract.AGENT_LOG)
    if log := agents.log_excerpt(run.node_folder(0)).log:
        logs.append(log)
    found = LogExcerpt()
    for log in filter(Path.exists, logs):
        lines = [line for line in lines_of(log) if not _NOISE.match(line)]
        causes = dict.fromkeys(line for line in lines if not (line[0].isspace() or scheduler.log_noise.match(line)))
        if causes:
            return LogExcerpt(log, [line.removeprefix("allranks: ") for line in [*causes][-2:]])
        if lines and not found.causes:
            found = LogExcerpt(log, lines[-1:])
        elif found.log is None:
            found = LogExcerpt(log)
    return found


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


def _with_text(pattern: str) -> Iterator[Path]:
    """Yield the files that an absolute pattern fits and that are not empty, the one that was changed last first."""
    found = []
    for path in Path("/").glob(pattern.lstrip("/")):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found += [(stat.st_mtime, path)] if stat.st_size else []
    yield from (path for _, path in sorted(found, reverse=True))
