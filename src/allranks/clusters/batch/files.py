"""The logs of a run's job: which files they are, and which of their lines may tell a cause."""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.runs import agents
from allranks.runs.attempt import first_failure, lines_of, read_json
from allranks.runs.status import LogExcerpt

if TYPE_CHECKING:
    from allranks.clusters.batch.scheduler import Scheduler
    from allranks.runs.record import Run

#: Tells no cause in any log: what bash prints of a signal, and what agents and the supervisor print besides.
_NOISE = re.compile(r"Terminated$|(?:allranks: )?(?:node \d+: )?[A-Z_]+=\S*: |allranks: (?:an|no )other attempt")


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


def _with_text(pattern: str) -> Iterator[Path]:
    """Yield the files that an absolute pattern fits and that are not empty, the one that was changed last first."""
    found = []
    for path in Path("/").glob(pattern.lstrip("/")):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found += [(stat.st_mtime, path)] if stat.st_size else []
    yield from (path for _, path in sorted(found, reverse=True))
