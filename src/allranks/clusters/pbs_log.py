"""What a PBS job leaves in the run's folder that tells why it failed: exit codes of its tasks, and logs."""

from __future__ import annotations

import contextlib
import glob
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract, processes
from allranks.clusters import agents
from allranks.clusters.base import Said
from allranks.clusters.queued_log import plan_of, telling, with_text
from allranks.runs.status import Status

if TYPE_CHECKING:
    from allranks.runs.record import Run

#: What PBS itself says, in the run's folder.
OWN_LOG = "pbs.out"
#: Of an array, where OpenPBS fills in the task.
OWN_LOG_OF_TASKS = "pbs.^array_index^.out"
#: What the plan calls the logs that the job asks for, those with errors first.
_ASKED = ("scheduler.error", "scheduler.output")
_RANK = re.compile(r"rank-(\d+)")
#: What of a log says nothing of the cause.
_NOISE = re.compile(
    r"(?:allranks: )?(?:node \d+: )?[A-Z_]+=\S*: |allranks: (?:an|no )other attempt|pbsdsh: |pbs_tmrsh: |Terminated$"
)
#: With these others are ended when one has left.
_OF_OTHERS = (128 + signal.SIGTERM, 128 + signal.SIGKILL)


@dataclass(frozen=True)
class TaskEnd:
    """How a task of a job ended, by its own word.

    Attributes:
        time: when, in seconds since 1970, by the clock of the file's server.
        folder: of its node.
        rank: the global rank; None for an agent.
        code: its exit code, as a shell tells it.
        host: the node's name.
    """

    time: float
    folder: Path
    rank: int | None
    code: int
    host: str


def blame(status: Status, folder: Path, attempt: Path) -> Status:
    """Tell in a run's status which rank failed first, where no agent could tell.

    Args:
        status: of a run that has failed, as it is known otherwise.
        folder: the run's.
        attempt: folder of the newest attempt.
    """
    first = first_failure(attempt)
    if first is None or any(attempt.glob(f"node-*/{contract.AGENT_EVENTS}")):
        return status  # Agents know more.
    logs = {log.name for log in attempt.glob(f"node-*/{contract.rank_log('*', 'err')}")}
    if first.rank is None or not logs:
        return replace(status, exit_code=first.code)
    many = plan_of(folder).get("nnodes", 1) > 1
    code = first.code if first.code <= 128 else 128 - first.code
    reason = processes.rank_ended(first.rank, code, first.host if many else None)
    has_log = contract.rank_log(first.rank, "err") in logs  # Else its node was still being set up.
    return replace(status, reason=reason, exit_code=first.code, rank=first.rank if has_log else None)


def first_failure(attempt: Path) -> TaskEnd | None:
    """Return how the task ended that failed first; None if none has."""
    ends = [end for end in _ends(attempt) if end.code]
    left = any(end.code == contract.CONTINUE_LATER for end in ends)
    failed = [end for end in ends if end.code != contract.CONTINUE_LATER and not (left and end.code in _OF_OTHERS)]
    return min(failed, key=lambda end: (end.time, end.rank or 0), default=None)


def said(run: Run) -> Said:
    """Find what may tell why a run's newest attempt ended: in the script's log, in PBS's, or in a node's."""
    logs = [*_of_script(run), run.folder / OWN_LOG, *_of_nodes(run)]
    before = _before(run.attempt_folder)
    for log in logs:
        if log.exists() and (found := telling(log, _NOISE, before.get(str(log), 0))):
            return Said(log, found)
    return Said(next((log for log in logs if log.exists()), None))


def _before(attempt: Path) -> dict[str, int]:
    """Return how long logs were when an attempt began: PBS runs a job again under its id, and the script appends."""
    with contextlib.suppress(OSError):
        pairs = (line.partition(" ") for line in (attempt / contract.LOGS_BEFORE).read_text().splitlines())
        return {path: int(size) for size, _, path in pairs if size.isdecimal()}
    return {}


def _ends(attempt: Path) -> Iterator[TaskEnd]:
    for path in attempt.glob(f"node-*/*{contract.TASK_EXIT}"):
        with contextlib.suppress(OSError, ValueError):
            code, host = path.read_text().split()
            rank = _RANK.match(path.name)
            yield TaskEnd(path.stat().st_mtime, path.parent, int(rank[1]) if rank else None, int(code), host)


def _of_script(run: Run) -> Iterator[Path]:
    """Yield the logs of the script of the newest job, those with errors first."""
    reasons = {reason["subject"]: reason["value"] for reason in plan_of(run.folder).get("reasons", ())}
    asked = [glob.escape(reasons[name]) for name in _ASKED if name in reasons]
    job = glob.escape((run.job_id or "").partition(".")[0]).replace("[[]]", "[[]*]")  # Each task of an array has one.
    patterns = [*asked, f"{glob.escape(str(run.folder))}/pbs-{job}.out"]
    for pattern in patterns:
        yield from (path for _, path in sorted(with_text(pattern), reverse=True))


def _of_nodes(run: Run) -> Iterator[Path]:
    """Yield the log of the node that failed first, and that of the first node."""
    if first := first_failure(run.attempt_folder):
        yield first.folder / contract.AGENT_LOG
    if log := agents.said(run.node_folder(0)).log:
        yield log
