"""Reads what the jobs and tasks of an attempt have recorded in its directory: ids, exit codes, decisions."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from pathlib import Path
from typing import Any, NamedTuple

from allranks import contract
from allranks.runs.record import newest_attempt
from allranks.runs.status import TIMED_OUT, State, Status
from allranks.system.processes import rank_ended


class Failure(NamedTuple):
    """Failure of a rank without an agent, as its scheduler reports it or its task has recorded it."""

    rank: int | None  # Global rank, the lowest of those that failed alike at the same time; None for an agent.
    host: str | None  # Its node, if known.
    code: int  # As in subprocess, negative for a signal.
    out_of_memory: bool = False  # Whether the scheduler reports that memory ran out.
    time: float = 0.0  # By the file server's clock, if the task has recorded it; else 0.
    folder: Path = Path()  # Directory of its node, likewise.

    def in_words(self, *, with_host: bool) -> str:
        """Return the failure as a sentence in the wording of agents."""
        text = rank_ended(self.rank or 0, self.code, self.host if with_host else None)
        return f"{text}: it ran out of memory" if self.out_of_memory else text

    def blamed(self, status: Status, attempt: Path, *, with_host: bool) -> Status:
        """Return the status of a failed attempt with this failure as its cause: the rank, or the set-up's exit code."""
        of_ranks = {log.name for log in attempt.glob(f"node-*/{contract.rank_log('*', 'err')}")}
        code = self.code if self.code > 0 else 128 - self.code
        if self.rank is None or not of_ranks:
            return status._replace(exit_code=code)
        # A rank of another node may have no log yet if that node was still in its set-up.
        rank = self.rank if contract.rank_log(self.rank, "err") in of_ranks else None
        return status._replace(reason=self.in_words(with_host=with_host), exit_code=code, rank=rank)


def newest(folder: Path) -> Path:
    """Return the directory of a run's newest attempt."""
    return folder / contract.attempt_dir(newest_attempt(folder))


def current_job(folder: Path, first: str) -> str:
    """Return the id of a run's current job: that of its newest attempt, or the one queued after it.

    Args:
        folder: directory of the run.
        first: id of the submitted job, with its cluster if Slurm named one, which the job itself does not know.
    """
    attempt = newest(folder)
    found = str(decision_after(attempt).get("job") or "")
    with contextlib.suppress(OSError):
        found = found or (attempt / contract.JOB).read_text().strip()
    _, separator, cluster = first.partition(";")
    return f"{found}{separator}{cluster}" if found else first


def decision_after(attempt: Path) -> dict[str, Any]:
    """Return the decision at the end of an attempt; empty before that."""
    return read_json(attempt / contract.AGAIN)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


def exit_of(attempt: Path) -> tuple[int, float] | None:
    """Return exit code and exit time of an attempt's script; None while it runs."""
    with contextlib.suppress(OSError, ValueError):
        path = attempt / contract.EXIT
        return int(path.read_text()), path.stat().st_mtime
    return None


def forgotten(attempt: Path, reported: Status, why: str, *, has_started: bool) -> Status:
    """Return the status of an attempt that its scheduler does not know, from its agents' reports or its script.

    ``has_started`` is whether its script is known to have started; otherwise this is derived from its files.
    """
    status = reported
    traces = ((attempt / contract.JOB).exists(), *attempt.parents[1].glob(f"{contract.TASK}*"))
    if not reported.state.is_final:
        if ended := exit_of(attempt):
            states = {0: State.SUCCEEDED, contract.CONTINUE_LATER: State.PREEMPTED}
            states |= {128 + number: State.CANCELLED for number in (signal.SIGINT, signal.SIGTERM)}
            state = states.get(ended[0], State.FAILED)
            status = reported._replace(state=state, native="ended", reason=None, exit_code=ended[0])
        elif not (has_started or any(traces)):
            # Some schedulers keep no record of a job that was deleted before it started.
            reason, code = "it was deleted before it started", 128 + signal.SIGTERM
            status = reported._replace(state=State.CANCELLED, native="deleted", reason=reason, exit_code=code)
        else:
            reason = f"{why}: its final state is unknown"
            status = reported._replace(state=State.UNKNOWN, native="forgotten", reason=reason)
    if status.state in (State.CANCELLED, State.UNKNOWN):
        with contextlib.suppress(OSError, ValueError):
            terminated = attempt / contract.TERMINATED  # Written when the script got SIGTERM; it holds the time limit.
            if terminated.stat().st_mtime >= int(terminated.read_text()):
                code = status.exit_code or 128 + signal.SIGTERM
                return status._replace(state=State.TIMEOUT, reason=": ".join(TIMED_OUT), exit_code=code)
    return status


def remove_secrets(folder: Path) -> None:
    """Remove the secrets of a run that has ended, in case its script was killed before it did so."""
    left = folder.glob(f"{contract.ATTEMPTS_DIR}/*/{contract.TASK_ENVIRONMENT}*")
    with contextlib.suppress(OSError):
        for file in (folder / contract.SECRETS_FILE, *left):
            file.unlink(missing_ok=True)


def first_failure(attempt: Path) -> Failure | None:
    """Return the failure of the first task that failed, from the tasks' own records; None if there is none."""
    failed = []
    for path in attempt.glob(f"node-*/*{contract.TASK_EXIT}"):
        with contextlib.suppress(OSError, ValueError):
            text, host = path.read_text().split()
            code = int(text) if int(text) <= 128 else 128 - int(text)
            rank = int(found[1]) if (found := re.match(r"rank-(\d+)", path.name)) else None
            end = Failure(rank, host, code, time=path.stat().st_mtime, folder=path.parent)
            failed += [end] if code else []
    if any(end.code == contract.CONTINUE_LATER for end in failed):  # These two codes then mean: ended by others.
        of_others = (contract.CONTINUE_LATER, -signal.SIGTERM, -signal.SIGKILL)
        failed = [end for end in failed if end.code not in of_others]
    return min(failed, key=lambda end: (end.time, end.rank or 0), default=None)
