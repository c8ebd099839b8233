"""Whether a batch job that ended too early gets another attempt, and how many there may be.

The supervisor decides at the job's end, and at the start of each attempt but the first: the scheduler and its admin
requeue jobs too, and count no attempts. The decision and its reason are in ``attempts/NNN/again.json`` and on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from allranks import contract
from allranks.agent.batch_job import BatchJob
from allranks.errors import RunFolderError
from allranks.record.events import SaveRecord, read_events, read_saves
from allranks.record.files import write_json
from allranks.record.notify import Notifier

#: So many attempts in a row may end without a checkpoint of a later step than before.
_FRUITLESS = 3
#: The exit code after SIGTERM, which comes when a job is cancelled or preempted.
_TERMINATED = 128 + signal.SIGTERM
#: When a task has left with any code but 0, the step's other tasks may be ended before they have left themselves.
_ENDED_BY_OTHERS = (_TERMINATED, 128 + signal.SIGKILL)
_RETRY_ON = (contract.NODE, contract.PREEMPTION)
#: How long a requeue waits until it is notified of: a server that does not answer must not cost it.
_NOTIFY_SECONDS = 3.0
#: How long the verdict on an attempt may take: it reads the logs of all ranks.
_VERDICT_SECONDS = 120.0
#: Of a job that the scheduler has ended because a daemon of its own was gone or restarted.
_ENDED_WITH_A_NODE = (contract.CONTINUE_LATER, *_ENDED_BY_OTHERS)


@dataclass(frozen=True)
class Decision:
    """Whether another attempt is to follow, and why, in one line."""

    again: bool
    why: str
    how: str | None = None  # requeue; dependent: by a job that waits for the end of this one; submit: by another job.
    job: str | None = None  # The id under which the run continues.
    given_up: bool = False  # Whether there was reason for another attempt, and more against it.
    lost: bool = False  # Whether nodes were lost.
    without: str | None = None  # The host that the next attempt must not use.


def may_start(run: Path, attempt: int, most: int, job: BatchJob) -> bool:
    """Return whether an attempt is to start its ranks; if not, that is recorded and printed."""
    folder = run / contract.attempt_dir(attempt)
    # A job that the scheduler has put back keeps its id; another one was named when it was submitted.
    known = set()
    for number in range(attempt):
        earlier = run / contract.attempt_dir(number)
        with suppress(OSError):
            known.add((earlier / contract.JOB).read_text().strip())
        with suppress(OSError, ValueError):
            known.add(json.loads((earlier / contract.AGAIN).read_text())["job"])
    if job.id not in known:  # A person has submitted it.
        with suppress(OSError):
            (folder / contract.RESUMED).touch()
    if why := _why_not(read_saves(run), attempt, most, _resumed(run, attempt)):
        _record(folder, Decision(False, why, given_up=True))
        print(f"allranks: this attempt does not start: {why}", flush=True)
    return not why


def follows(run: Path, attempt: int, code: int, most: int, job: BatchJob, notifier: Notifier) -> bool:
    """Decide whether another attempt follows one that has ended with an exit code, act, record, print and notify."""
    folder = run / contract.attempt_dir(attempt)
    if (folder / contract.AGAIN).exists():
        return False  # It did not start.
    if code == _TERMINATED and job.preempted():
        code = contract.CONTINUE_LATER
    decision = decide(run, attempt, code, most, job.orders.retry_on)
    if decision.again:
        why, exit_code = decision.why, code

        def notify() -> None:
            notifier.send("requeue", state="PENDING", exit_code=exit_code, reason=why)
            notifier.report(_NOTIFY_SECONDS)  # The scheduler may give this process a few seconds alone.

        decision = start_next(run, attempt, decision, job, notify)
    _record(folder, decision)
    if decision.again or decision.given_up:  # Else the ranks' own last words are those that count.
        word = "another attempt follows" if decision.again else "no other attempt"
        print(f"allranks: {word}: {decision.why}", flush=True)
    return decision.again


def decide(run: Path, attempt: int, code: int, most: int, retry_on: Collection[str] = _RETRY_ON) -> Decision:
    """Decide whether there is reason for another attempt, after one that ended with a code, and none against it."""
    folder, noted = run / contract.attempt_dir(attempt), read_saves(run)
    lost = set[str]()
    for path in folder.glob(f"node-*/{contract.AGENT_EVENTS}"):
        for event in read_events(path):
            if event.kind == contract.ENDED:
                lost.update(event.fields.get("lost") or ())
    if not lost and code in _ENDED_WITH_A_NODE and (folder / contract.TERMINATED).exists():
        # The scheduler has ended the job because its daemon did not see the end of a task.
        lost = {path.read_text().strip() for path in folder.glob(f"node-*/{contract.CUT_OFF}")}
    has_left = code == contract.CONTINUE_LATER
    if code in _ENDED_BY_OTHERS:
        has_left = any(note.leaving for note in noted if note.attempt == attempt)
    without = None
    if not has_left and not lost:
        unfit = _unfit_node(run, folder) if code and contract.HARDWARE in retry_on else None
        if unfit is None:
            return Decision(False, f"it exited with code {code}, and is not retried")
        why, without = unfit
    else:
        why = f"{', '.join(sorted(lost))} was lost" if lost else "it was stopped on request, and is to be continued"
        if (end := contract.NODE if lost else contract.PREEMPTION) not in retry_on:
            return Decision(False, f"{why}, but retry.on does not name {end}", given_up=True)
    if against := _why_not(noted, attempt + 1, most, _resumed(run, attempt)):
        return Decision(False, f"{why}, but {against}", given_up=True)
    return Decision(True, why, lost=bool(lost), without=without)


def _unfit_node(run: Path, attempt: Path) -> tuple[str, str] | None:
    """Return why a node, and which, is to be left out after a rank has failed there; None if that does not help."""
    if (attempt / contract.TERMINATED).exists():
        return None  # The scheduler has ended the job.
    command = [sys.executable, "-m", "allranks.diagnosis", str(attempt)]
    code = os.pathsep.join(filter(None, (str(run / contract.CODE), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": code},
            stdout=subprocess.PIPE,
            timeout=_VERDICT_SECONDS,
            check=True,
        )
        verdict = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"allranks: no verdict on this attempt: {error}", file=sys.stderr)
        return None
    if not verdict or (verdict["sure"], verdict["retry"]) != ("certain", "on other nodes") or not verdict["host"]:
        return None
    return f"{verdict['cause']} on {verdict['host']}", verdict["host"]


def _resumed(run: Path, attempt: int) -> int:
    """Return the newest attempt that a person has started; those before count no more."""
    numbers = range(attempt, 0, -1)
    return next((number for number in numbers if (run / contract.attempt_dir(number) / contract.RESUMED).exists()), 0)


def _why_not(noted: list[SaveRecord], attempt: int, most: int, first: int) -> str | None:
    """Return why no attempt may follow those from ``first`` on; None if one may."""
    if attempt - first >= most:
        return f"there were {attempt - first} attempts: {most} are allowed (retry.max_attempts)"
    if not noted or attempt - first < _FRUITLESS:
        return None
    newest = attempt - 1 - _FRUITLESS
    best = max((note.step for note in noted if note.attempt < attempt), default=0)
    before = max((note.step for note in noted if note.attempt <= newest), default=0)
    return f"{_FRUITLESS} attempts in a row came no further than step {best}" if best == before else None


def start_next(
    run: Path, attempt: int, decision: Decision, job: BatchJob, notify: Callable[[], None] = lambda: None
) -> Decision:
    """Requeue the job, or submit another one; return which was done, or why none could be.

    ``notify`` is called before: to be put back into the queue may end this process at once.
    """
    if ending := job.ending():
        return _given_up(decision, ending)
    notify()
    refused = None
    if decision.without is None:
        # Recorded before: to be put back into the queue may end this process at once.
        requeued = replace(decision, how="requeue", job=job.id)
        _record(run / contract.attempt_dir(attempt), requeued)
        refused = job.requeue(lost=decision.lost)
        if refused is None:
            return requeued
        if ending := job.ending():  # It was cancelled meanwhile: another job would continue what a person has ended.
            return _given_up(decision, ending)
    elif not job.can_exclude:  # Another job has to leave the host out: that of a running job cannot be changed.
        return _given_up(decision, f"{job.variables.name} cannot leave a node out")
    new, problem = job.submit(run, lost=decision.lost, without=decision.without)
    if problem is not None:
        return _given_up(decision, f"{refused}, and {problem}" if refused else problem)
    how = "dependent" if job.waits(lost=decision.lost) else "submit"
    return replace(decision, how=how, job=new, why=f"{decision.why}; {refused}" if refused else decision.why)


def _given_up(decision: Decision, against: str) -> Decision:
    return Decision(False, f"{decision.why}, but {against}", given_up=True)


def _record(attempt: Path, decision: Decision) -> None:
    try:
        write_json(attempt / contract.AGAIN, asdict(decision), attempt.stat().st_mode & 0o040 | 0o600)
    except (OSError, RunFolderError) as error:
        print(f"allranks: {error}", file=sys.stderr)
