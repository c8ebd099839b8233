"""Which rank srun says failed first, in Slurm's own log of a run, where no agent could tell."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from allranks import contract, processes
from allranks.clusters import slurm_said
from allranks.clusters.queued_log import lines_of, plan_of
from allranks.runs.status import Status

#: What srun says when tasks have ended badly, the same from Slurm 22.05 to 26.11; of a signal it gives the words of
#: the C library.
_ENDED = re.compile(
    r"srun: error: (\S+): tasks? (\d+)[\d,-]*: (?:Exited with exit code (\d+)|(.+?)(?: \(core dumped\))?)"
)
_OUT_OF_MEMORY = "Out Of Memory"
_SIGNALS = {words: number for number in signal.valid_signals() if (words := signal.strsignal(number))}
#: With these srun ends the ranks that are left.
_OF_SRUN = (-signal.SIGTERM, -signal.SIGKILL)
#: The log goes on over attempts.
_REQUEUED = "DUE TO JOB REQUEUE"
_OURS, _FOLLOWS, _LAST = "allranks: ", "allranks: another attempt follows", "allranks: no other attempt"


@dataclass(frozen=True)
class Failure:
    """How a rank ended, by the word of srun.

    Attributes:
        rank: the global rank; the lowest of those that ended alike at the same time.
        host: the node that it was on, if srun names one.
        code: as Python tells it, negative for a signal.
        out_of_memory: whether Slurm says that memory ran out.
    """

    rank: int
    host: str | None
    code: int
    out_of_memory: bool = False

    def told(self, *, with_host: bool) -> str:
        """Say it, in the words of the agents."""
        text = processes.rank_ended(self.rank, self.code, self.host if with_host else None)
        return f"{text}: it ran out of memory" if self.out_of_memory else text


def blame(status: Status, folder: Path, attempt: Path, job_id: str) -> Status:
    """Tell in a run's status what failed first, if srun has told that: a rank, or a node that was still being set up.

    The exit code of srun itself is the highest of all, and 143 where it had to end others.

    Args:
        status: of a run that has failed, as it is known otherwise.
        folder: the run's.
        attempt: folder of the newest attempt.
        job_id: id of the job.
    """
    logs = [*attempt.glob(f"node-*/{contract.rank_log('*', 'err')}")]
    if any(attempt.glob(f"node-*/{contract.AGENT_EVENTS}")):
        return status  # Agents know more.
    log = slurm_said.find_log(folder, job_id)
    failure = first_failure(lines_of(log)) if log else None
    if failure is None:
        return status
    code = failure.code if failure.code > 0 else 128 - failure.code
    if not logs:
        return replace(status, exit_code=code)
    many = plan_of(folder).get("nnodes", 1) > 1  # A rank of another node may have no log yet.
    has_log = contract.rank_log(failure.rank, "err") in {log.name for log in logs}
    return replace(
        status,
        reason=failure.told(with_host=many),
        exit_code=code,
        rank=failure.rank if has_log else None,
    )


def first_failure(lines: Iterable[str]) -> Failure | None:
    """Return how the rank ended that failed first in the newest attempt; None if none has."""
    found: Failure | None = None
    has_left = is_over = is_requeued = False
    for line in lines:
        if _REQUEUED in line or line.startswith(_FOLLOWS):
            # A job that is put back is killed first: what its ranks end with comes later.
            found, has_left, is_over, is_requeued = None, False, False, _REQUEUED in line
        elif line.startswith(_LAST):
            is_over, is_requeued = True, False
        elif line.startswith(_OURS) or not is_requeued:
            failure = _failure(line)
            if is_over and (failure or line.startswith(_OURS)):
                found, has_left, is_over = None, False, False  # Another attempt, that a person has started.
            is_requeued = False
            if failure and failure.code == contract.CONTINUE_LATER:
                has_left = True
            elif failure and not (has_left and failure.code in _OF_SRUN):
                found = found or failure
    return found


def _failure(line: str) -> Failure | None:
    match = _ENDED.fullmatch(line.rstrip())
    if not match:
        return None
    hosts, rank, code, words = match[1], int(match[2]), match[3], match[4]
    host = None if hosts == "Unknown" or "[" in hosts or "," in hosts else hosts
    if code:
        return Failure(rank, host, int(code))
    if words == _OUT_OF_MEMORY:
        return Failure(rank, host, -signal.SIGKILL, out_of_memory=True)
    return Failure(rank, host, -_SIGNALS[words]) if words in _SIGNALS else None
