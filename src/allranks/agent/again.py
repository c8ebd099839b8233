"""Whether a scheduler's job that has ended too early goes back into the queue, and how often.

``python <run>/code --again RUN ATTEMPT EXITCODE MAX_ATTEMPTS``, called by the job's script at its end, and with
``begin`` as the exit code at the beginning of an attempt that is not the first: who else may have put the job back
into the queue, Slurm or its admin, does not count attempts. What was decided and why stands in
``attempts/NNN/again.json`` and on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn, Protocol

from allranks import contract
from allranks.agent.pbs_queue import PbsQueue
from allranks.agent.slurm_queue import SlurmQueue
from allranks.errors import RunFolderError
from allranks.runs.events import read_events
from allranks.runs.files import write_json
from allranks.runs.saves import Save, read_saves

_NO_QUEUE = "there is no scheduler here to be asked for another attempt"
#: So many attempts in a row may end without a checkpoint of a later step than before.
_FRUITLESS = 3
_BEGIN = "begin"
#: Of whoever ends on SIGTERM, which comes when a job is cancelled or preempted.
_TERMINATED = 128 + signal.SIGTERM
#: When a task has left with any code but 0, the step's other tasks may be ended before they have left themselves.
_ENDED_BY_OTHERS = (_TERMINATED, 128 + signal.SIGKILL)
#: Of a job that the scheduler has ended because a daemon of its own was gone or restarted.
_ENDED_WITH_A_NODE = (contract.CONTINUE_LATER, *_ENDED_BY_OTHERS)


@dataclass(frozen=True)
class Decision:
    """What was decided.

    Attributes:
        again: whether another attempt is to follow.
        why: in one line.
        how: ``requeue``; ``dependent`` for another job that waits for the end of this one, ``submit`` for one that
            does not.
        job: the id under which the run goes on.
        given_up: whether there was reason for another attempt, and more against it.
        lost: whether nodes were lost.
    """

    again: bool
    why: str
    how: str | None = None
    job: str | None = None
    given_up: bool = False
    lost: bool = False


class Queue(Protocol):
    """A scheduler's queue, as the job that runs in it sees it."""

    job: str

    def preempted(self) -> bool:
        """Tell whether the scheduler ends this job because others come first."""

    def ending(self) -> str | None:
        """Tell why the scheduler is ending this job already, if it is."""

    def requeue(self, *, lost: bool) -> str | None:
        """Put this job back into the queue; return what kept it from that. It may kill this process.

        Args:
            lost: whether nodes were lost.
        """

    def waits(self, *, lost: bool) -> bool:
        """Tell whether a job that :meth:`submit` submits waits for the end of this one."""

    def submit(self, run: Path, *, lost: bool) -> tuple[str, str | None]:
        """Submit the run's script; return the new id, and what kept it from that.

        Args:
            run: the run's folder.
            lost: whether nodes were lost.
        """


def main(argv: list[str]) -> NoReturn:
    """Decide, act, and tell; ends with a code of its own when an attempt is not to begin."""
    run, attempt, when, most = Path(argv[0]), int(argv[1]), argv[2], int(argv[3])
    if when == _BEGIN:
        _begin(run, attempt, most)
    if _did_not_begin(run, attempt):
        sys.exit(0)
    queue, code = find_queue(), int(when)
    is_preempted = code == _TERMINATED and queue is not None and queue.preempted()
    decision = decide(run, attempt, contract.CONTINUE_LATER if is_preempted else code, most)
    if decision.again:
        decision = go_on(run, attempt, decision, queue) if queue else _given_up(_NO_QUEUE)
    tell(run, attempt, decision)
    if decision.again or decision.given_up:  # Else the script's own last words are those that count.
        word = "another attempt follows" if decision.again else "no other attempt"
        print(f"allranks: {word}: {decision.why}", flush=True)
    sys.exit(0)


def _begin(run: Path, attempt: int, most: int) -> NoReturn:
    _note_a_person(run, attempt)
    if why := _why_not(read_saves(run), attempt, most, _resumed(run, attempt)):
        tell(run, attempt, _given_up(why))
        print(f"allranks: this attempt does not begin: {why}", flush=True)
        sys.exit(contract.GIVEN_UP)
    sys.exit(0)


def _note_a_person(run: Path, attempt: int) -> None:
    """Note that a person has begun this attempt, if it is of a job that nothing here has put into the queue."""
    queue = find_queue()
    # A job that the scheduler has put back keeps its id; another one was named when it was submitted.
    known = {job for number in range(attempt) for job in (_job_of(run, number), _job_after(run, number))}
    if queue and queue.job not in known:
        with suppress(OSError):
            (run / contract.attempt_dir(attempt) / contract.RESUMED).touch()


def _job_of(run: Path, attempt: int) -> str | None:
    """Return the job that an attempt was."""
    with suppress(OSError):
        return (run / contract.attempt_dir(attempt) / contract.JOB).read_text().strip()
    return None


def _job_after(run: Path, attempt: int) -> str | None:
    """Return the job under which the run was to go on after an attempt."""
    with suppress(OSError, ValueError):
        return dict(json.loads((run / contract.attempt_dir(attempt) / contract.AGAIN).read_text())).get("job")
    return None


def _did_not_begin(run: Path, attempt: int) -> bool:
    return (run / contract.attempt_dir(attempt) / contract.AGAIN).exists()


def decide(run: Path, attempt: int, code: int, most: int) -> Decision:
    """Decide whether there is reason for another attempt, and none against it.

    Args:
        run: the run's folder.
        attempt: the number of the one that has ended.
        code: its exit code.
        most: how many attempts there may be.
    """
    lost = sorted(set(_lost_nodes(run / contract.attempt_dir(attempt))))
    noted = read_saves(run)
    cut_off = sorted(_cut_off_nodes(run / contract.attempt_dir(attempt))) if code in _ENDED_WITH_A_NODE else []
    has_left = code == contract.CONTINUE_LATER or (code in _ENDED_BY_OTHERS and _has_left(noted, attempt))
    if not has_left and not lost and not cut_off:
        return Decision(False, f"it has ended with exit code {code}, which is none to try again for")
    why = "it was asked to stop, and is to be continued"
    if nodes := lost or cut_off:
        why = f"{', '.join(nodes)} was lost"
    if against := _why_not(noted, attempt + 1, most, _resumed(run, attempt)):
        return _given_up(f"{why}, but {against}")
    return Decision(True, why, lost=bool(lost or cut_off))


def _resumed(run: Path, attempt: int) -> int:
    """Return the newest attempt that a person has begun; those before count no more."""
    numbers = range(attempt, 0, -1)
    return next((number for number in numbers if (run / contract.attempt_dir(number) / contract.RESUMED).exists()), 0)


def _why_not(noted: list[Save], attempt: int, most: int, first: int) -> str | None:
    """Tell why an attempt is not to follow those from ``first`` on; None if it is."""
    if attempt - first >= most:
        return f"there were {attempt - first} attempts: {most} are allowed (retry.max_attempts)"
    best = _best(noted, attempt - 1)
    if noted and attempt - first >= _FRUITLESS and best == _best(noted, attempt - 1 - _FRUITLESS):
        return f"{_FRUITLESS} attempts in a row came no further than step {best}"
    return None


def go_on(run: Path, attempt: int, decision: Decision, queue: Queue) -> Decision:
    """Have another attempt follow; return what came of that."""
    if ending := queue.ending():
        return _given_up(f"{decision.why}, but {ending}")
    # Told before: to be put back into the queue may end this process at once.
    requeued = replace(decision, how="requeue", job=queue.job)
    tell(run, attempt, requeued)
    refused = queue.requeue(lost=decision.lost)
    if refused is None:
        return requeued
    job, problem = queue.submit(run, lost=decision.lost)
    if problem is None:
        how = "dependent" if queue.waits(lost=decision.lost) else "submit"
        return replace(decision, how=how, job=job, why=f"{decision.why}; {refused}")
    return _given_up(f"{decision.why}, but {refused}, and {problem}")


def _given_up(why: str) -> Decision:
    return Decision(False, why, given_up=True)


def find_queue() -> Queue | None:
    """Return the queue that this job is in, if it is in one."""
    if os.environ.get("SLURM_JOB_ID"):
        return SlurmQueue(os.environ)
    return PbsQueue(os.environ) if os.environ.get("PBS_JOBID") else None


def tell(run: Path, attempt: int, decision: Decision) -> None:
    """Write a decision down."""
    folder = run / contract.attempt_dir(attempt)
    try:
        write_json(folder / contract.AGAIN, asdict(decision), folder.stat().st_mode & 0o040 | 0o600)
    except (OSError, RunFolderError) as error:
        print(f"allranks: {error}", file=sys.stderr)


def _lost_nodes(attempt: Path) -> Iterator[str]:
    """Yield the nodes that were lost, by the word of the agents that this has ended."""
    for path in attempt.glob(f"node-*/{contract.AGENT_EVENTS}"):
        for event in read_events(path):
            if event.kind == contract.ENDED:
                yield from event.fields.get("lost") or ()


def _cut_off_nodes(attempt: Path) -> Iterator[str]:
    """Yield the nodes whose tasks ended unseen by the scheduler; none unless it has ended the job for that."""
    if (attempt / contract.TERMINATED).exists():
        for path in attempt.glob(f"node-*/{contract.CUT_OFF}"):
            yield path.read_text().strip()


def _best(noted: list[Save], attempt: int) -> int:
    """Return the highest step that was reached by the end of an attempt; 0 for none."""
    return max((note.step for note in noted if note.attempt <= attempt), default=0)


def _has_left(noted: list[Save], attempt: int) -> bool:
    """Tell whether all ranks had saved and were leaving, the last that is known of them."""
    return any(note.leaving for note in noted if note.attempt == attempt)
