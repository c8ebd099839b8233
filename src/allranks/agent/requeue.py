"""Decides whether a batch job that ended too early gets another attempt.

The supervisor decides at the job's end, and checks the limit at the start of each later attempt, since schedulers and
their admins requeue jobs too. The decision and its reason go to ``attempts/NNN/again.json`` and stdout.
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

#: Most attempts in a row without progress, which is a checkpoint of a later step.
_FRUITLESS = 3
#: The exit code after SIGTERM, which comes when a job is cancelled or preempted.
_TERMINATED = 128 + signal.SIGTERM
#: Exit codes of a step that was killed because one of its tasks exited with a code other than 0.
_ENDED_BY_OTHERS = (_TERMINATED, 128 + signal.SIGKILL)
_RETRY_ON = (contract.NODE, contract.PREEMPTION)
#: Limit for the notification before a requeue: a server that does not answer must not prevent the requeue.
_NOTIFY_SECONDS = 3.0
#: Limit for the diagnosis of an attempt, which reads the logs of all ranks.
_VERDICT_SECONDS = 120.0
#: Exit codes of a job that the scheduler ended because its daemon on a node died or restarted.
_ENDED_WITH_A_NODE = (contract.CONTINUE_LATER, *_ENDED_BY_OTHERS)


@dataclass(frozen=True)
class Decision:
    """Whether another attempt follows, and why, in one line."""

    again: bool
    why: str
    how: str | None = None  # "requeue", "dependent" (a new job that depends on this one) or "submit" (a new job).
    job: str | None = None  # The id under which the run continues.
    given_up: bool = False  # Whether another attempt was wanted but not possible.
    lost: bool = False  # Whether nodes were lost.
    without: str | None = None  # A host that the next attempt must exclude.


def may_start(run: Path, attempt: int, most: int, job: BatchJob) -> bool:
    """Return whether an attempt may start its ranks; if not, record and print why."""
    folder = run / contract.attempt_dir(attempt)
    # A requeued job keeps its id; the id of a new job was recorded when an attempt submitted it.
    known = set()
    for number in range(attempt):
        earlier = run / contract.attempt_dir(number)
        with suppress(OSError):
            known.add((earlier / contract.JOB).read_text().strip())
        with suppress(OSError, ValueError):
            known.add(json.loads((earlier / contract.AGAIN).read_text())["job"])
    if job.id not in known:  # The user has submitted it.
        with suppress(OSError):
            (folder / contract.RESUMED).touch()
    if why := _why_not(read_saves(run), attempt, most, _resumed(run, attempt)):
        _record(folder, Decision(False, why, given_up=True))
        print(f"allranks: this attempt does not start: {why}", flush=True)
    return not why


def follows(run: Path, attempt: int, code: int, most: int, job: BatchJob, notifier: Notifier) -> bool:
    """Decide whether another attempt follows one that exited with ``code``; start it, record, print and notify."""
    folder = run / contract.attempt_dir(attempt)
    if (folder / contract.AGAIN).exists():
        return False  # It did not start.
    if code == _TERMINATED and job.preempted():
        code = contract.CONTINUE_LATER
    decision = decide(run, attempt, code, most, job.spec.retry_on)
    if decision.again:
        why, exit_code = decision.why, code

        def notify() -> None:
            notifier.send("requeue", state="PENDING", exit_code=exit_code, reason=why)
            notifier.report(_NOTIFY_SECONDS)  # The scheduler may leave this process only a few seconds.

        decision = start_next(run, attempt, decision, job, notify)
    _record(folder, decision)
    if decision.again or decision.given_up:  # Else the last output stays that of the ranks.
        word = "another attempt follows" if decision.again else "no other attempt"
        print(f"allranks: {word}: {decision.why}", flush=True)
    return decision.again


def decide(run: Path, attempt: int, code: int, most: int, retry_on: Collection[str] = _RETRY_ON) -> Decision:
    """Decide whether another attempt should follow one that exited with ``code``."""
    folder, noted = run / contract.attempt_dir(attempt), read_saves(run)
    lost = set[str]()
    for path in folder.glob(f"node-*/{contract.AGENT_EVENTS}"):
        for event in read_events(path):
            if event.kind == contract.ENDED:
                lost.update(event.fields.get("lost") or ())
    if not lost and code in _ENDED_WITH_A_NODE and (folder / contract.TERMINATED).exists():
        # The scheduler ended the job because its daemon missed the end of a task.
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
    """Return (cause, host) if a rank failed because of faulty hardware on a host; None otherwise."""
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
    """Return the newest attempt that the user has started; limits count from it."""
    numbers = range(attempt, 0, -1)
    return next((number for number in numbers if (run / contract.attempt_dir(number) / contract.RESUMED).exists()), 0)


def _why_not(noted: list[SaveRecord], attempt: int, most: int, first: int) -> str | None:
    """Return why no further attempt is allowed, counted from attempt ``first``; None if one is."""
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
    """Requeue the job or submit a new one; return the decision with how, or why that failed.

    ``notify`` is called first, because a requeue may kill this process at once.
    """
    if ending := job.ending():
        return _given_up(decision, ending)
    notify()
    refused = None
    if decision.without is None:
        # Recorded first, because a requeue may kill this process at once.
        requeued = replace(decision, how="requeue", job=job.id)
        _record(run / contract.attempt_dir(attempt), requeued)
        refused = job.requeue(lost=decision.lost)
        if refused is None:
            return requeued
        if ending := job.ending():  # Cancelled meanwhile: a new job would continue what the user has ended.
            return _given_up(decision, ending)
    elif not job.can_exclude:  # Only a new job can exclude a host.
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
