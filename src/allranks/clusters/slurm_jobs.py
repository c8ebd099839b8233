"""Slurm's commands and their answers: for each a function that builds it, and one that reads what it says.

Only the plain formats are read: what is needed of them is alike in all versions, where ``--json`` has had three shapes
and tells nothing more. Times are read as UTC, because :func:`look_up` asks in UTC.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from allranks.clusters import asking, slurm_errors, slurm_words
from allranks.clusters.job_info import overall
from allranks.clusters.reason import Reason
from allranks.errors import LaunchError
from allranks.job.units import parse_memory
from allranks.runs.status import State

SUBMIT = "sbatch"
#: Slurm's commands themselves try for a minute to find a controller.
_SECONDS = 90.0
#: Accounting only adds to what the controller tells, and its database may be slow or away.
_ACCOUNTING_SECONDS = 20.0
#: Slurm's own "signals": the script could not be started, and (a number that no signal has) memory ran out.
_NOT_STARTED, _OUT_OF_MEMORY = 53, 125
#: With these its commands write times as we read them.
IN_UTC = {"TZ": "UTC0", "SLURM_TIME_FORMAT": "standard"}

_ACCOUNTED = (
    "JobID",
    "State",
    "ExitCode",
    "Start",
    "End",
    "NodeList",
    "MaxRSS",
    "Reason",
)
#: Of the answer of scontrol, these lines hold no text of the user's, and each comes once, before all that do.
_SHOWN_LINE = re.compile(r"^   (?=(?:JobState|Requeue|StartTime|NodeList)=)(.*)$", re.MULTILINE)
_SHOWN_JOB = re.compile(r"JobId=(\d+) (?:ArrayJobId=(\d+) ArrayTaskId=(\S+) )?")
_SUBMITTED = re.compile(r"^(?:Submitted batch job )?(\d+)(?:(?:;| on cluster )(\S+))?\s*$", re.MULTILINE)


@dataclass(frozen=True)
class JobInfo:
    """What Slurm knows of a job. Times are in seconds since 1970, memory in bytes.

    Attributes:
        job_id: its id; of a task of an array ``1234_5``.
        state: our state.
        native: Slurm's word for it.
        word: Slurm's word for why it is so.
        exit_code: what the batch script ended with, if it ended by itself.
        signal: the signal that ended it, if one did; 53 is Slurm's own and means that the script could not be started.
        started: when it got its nodes; None while it waits.
        ended: when it ended; None before.
        nodes: its nodes, as Slurm writes them: ``node[01-04]``.
        failed_node: the node that failed, if Slurm tells.
        peak_memory: the most that a task of a step used, where accounting tells.
    """

    job_id: str
    state: State
    native: str
    word: str = ""
    exit_code: int | None = None
    signal: int | None = None
    started: float | None = None
    ended: float | None = None
    nodes: str = ""
    failed_node: str = ""
    peak_memory: int | None = None

    @property
    def why(self) -> Reason | None:
        """Why the job waits, or why it ended so, where Slurm tells more than the state does."""
        if self.state is State.FAILED and self.signal == _NOT_STARTED:
            text = "Slurm could not start the script: its work folder, or that of its output, is not there on the node"
            return Reason(text)
        if self.state is State.NODE_FAIL and self.failed_node:
            return Reason(f"node {self.failed_node} failed")
        return slurm_words.reason_of(self.native, self.word, self.job_id)

    @property
    def reason(self) -> str | None:
        """:attr:`why` in a sentence, with what can be done."""
        return str(self.why) if self.why else None


def cancel_command(job_id: str) -> tuple[str, ...]:
    """Build the command that cancels a job."""
    return ("scancel", *_of(job_id))


def show_command(job_id: str) -> tuple[str, ...]:
    """Build the command that asks the controller about a job."""
    *cluster, number = _of(job_id)
    return ("scontrol", *cluster, "show", "job", number)


def account_command(job_id: str) -> tuple[str, ...]:
    """Build the command that asks accounting about a job."""
    *cluster, number = _of(job_id)
    return ("sacct", *cluster, "--parsable2", "--noheader", f"--format={','.join(_ACCOUNTED)}", f"--jobs={number}")


def _of(job_id: str) -> tuple[str, ...]:
    number, _, cluster = job_id.partition(";")
    return (f"--clusters={cluster}", number) if cluster else (number,)


def parse_submitted(text: str) -> str:
    """Return the id in sbatch's answer: ``1234``, or ``1234;cluster``.

    Raises:
        LaunchError: there is none.
    """
    found = _SUBMITTED.findall(text)
    if not found:
        raise slurm_errors.SLURM.no_id(text)
    number, cluster = found[-1]  # A site's own messages come before.
    return f"{number};{cluster}" if cluster else number


def parse_shown(text: str) -> tuple[JobInfo, ...]:
    """Read the answer to :func:`show_command`: one job, or each task of an array.

    Names, comments and paths of a job may hold anything, also what looks like a field, so only lines are read that
    begin with a field of Slurm's own, and of two such lines the first.
    """
    found = []
    for part in re.split(r"^(?=JobId=)", text, flags=re.MULTILINE):
        fields: dict[str, str] = {}
        for line in _SHOWN_LINE.findall(part):
            fields = dict(re.findall(r"(\S+?)=(\S*)", line)) | fields
        if (job := _SHOWN_JOB.match(part)) and "JobState" in fields:
            found.append(_shown(f"{job[2]}_{job[3]}" if job[2] else job[1], fields))
    return tuple(found)


def _shown(job_id: str, fields: Mapping[str, str]) -> JobInfo:
    nodes = fields.get("NodeList", "")
    info = _info(job_id, fields["JobState"], fields.get("ExitCode", ""), nodes, fields.get("StartTime", ""))
    return replace(
        info,
        word=fields.get("Reason", ""),
        ended=_time(fields.get("EndTime", "")) if info.state.is_final else None,
        failed_node=fields.get("FailedNode", ""),
    )


def parse_accounted(text: str) -> tuple[JobInfo, ...]:
    """Read the answer to :func:`account_command`: one job, or each task of an array.

    Of a job that was requeued the last record counts. A job with a step that was out of memory was so too, although
    Slurm calls it FAILED.
    """
    records: dict[str, list[dict[str, str]]] = {}
    for line in text.splitlines():
        values = line.split("|")
        if len(values) != len(_ACCOUNTED):
            continue
        row = dict(zip(_ACCOUNTED, values, strict=True))
        job_id, _, step = row["JobID"].partition(".")
        records[job_id] = [*records.get(job_id, []), row] if step else [row]
    return tuple(_accounted(job_id, rows) for job_id, rows in records.items())


def _accounted(job_id: str, rows: Sequence[Mapping[str, str]]) -> JobInfo:
    job = rows[0]
    native = job["State"]
    if native == "FAILED" and any(row["State"] == "OUT_OF_MEMORY" for row in rows):
        native = "OUT_OF_MEMORY"
    info = _info(job_id, native, job["ExitCode"], job["NodeList"], job["Start"])
    return replace(
        info,
        word=job["Reason"],
        ended=_time(job["End"]) if info.state.is_final else None,
        peak_memory=max((_memory(row["MaxRSS"]) for row in rows), default=0) or None,
    )


def _info(job_id: str, native: str, code: str, nodes: str, start: str) -> JobInfo:
    """Make what both answers tell in the same words."""
    state = slurm_words.state_of(native)
    exited, _, signalled = code.partition(":")
    exit_code, signal = _number(exited), _number(signalled)
    if state is State.SUCCEEDED and (exit_code or signal):
        state = State.FAILED
    by_itself = state.is_final and not signal and (exit_code or state is State.SUCCEEDED)
    given = nodes if nodes not in ("(null)", "None assigned") else ""
    return JobInfo(
        job_id,
        state,
        native,
        exit_code=exit_code if by_itself else None,
        signal=signal if state.is_final and signal not in (0, _OUT_OF_MEMORY) else None,
        started=_time(start) if given and state is not State.PENDING else None,
        nodes=given,
    )


def ask(
    command: Sequence[str], environ: Mapping[str, str], *, cwd: str | Path | None = None, seconds: float = _SECONDS
) -> str:
    """Run a command of Slurm's and return its answer.

    Raises:
        LaunchError: the command is not there, Slurm cannot be reached, or it refuses.
    """
    return asking.ask(command, environ, slurm_errors.SLURM, cwd=cwd, seconds=seconds)


def look_up(job_id: str, environ: Mapping[str, str] | None = None) -> JobInfo | None:
    """Ask what has become of a job: the controller, and after its end accounting too, where there is any.

    Returns None when neither knows it: without accounting that is so some minutes after the end.

    Raises:
        LaunchError: Slurm cannot be reached.
    """
    in_utc = {**(os.environ if environ is None else environ), **IN_UTC}
    command = show_command(job_id)
    done = asking.run(command, in_utc, slurm_errors.SLURM, seconds=_SECONDS)
    if done.returncode and slurm_errors.NO_SUCH_JOB not in done.stderr:
        raise slurm_errors.SLURM.refusal(command, done.returncode, done.stdout + done.stderr)
    tasks = {task.job_id: task for task in parse_shown(done.stdout)}
    if any(not task.state.is_final for task in tasks.values()):
        return overall(tasks.values())
    with suppress(LaunchError):  # Most sites have accounting, and those that have not are fine without.
        answer = ask(account_command(job_id), in_utc, seconds=_ACCOUNTING_SECONDS)
        # What the controller does not know does not run, whatever accounting has of it. Tasks of an array that have
        # ended long before others are in accounting alone.
        for task in filter(lambda task: task.state.is_final, parse_accounted(answer)):
            shown = tasks.get(task.job_id)
            tasks[task.job_id] = _combined(shown, task) if shown else task
    return overall(tasks.values())


def _combined(shown: JobInfo, accounted: JobInfo) -> JobInfo:
    """Add to what the controller tells of a job that has ended what only accounting knows."""
    if shown.state is State.FAILED and accounted.state is State.OUT_OF_MEMORY:
        shown = replace(shown, state=accounted.state, native=accounted.native)
    if accounted.native.startswith(shown.native):  # CANCELLED by 1000.
        shown = replace(shown, native=accounted.native)
    return replace(shown, peak_memory=accounted.peak_memory)


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _time(text: str) -> float | None:
    """Return the time in seconds since 1970, if it is one: not ``Unknown``, ``None`` or ``N/A``."""
    with suppress(ValueError):
        return datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp()
    return None


def _memory(text: str) -> int:
    """Return the bytes in ``10744K``, ``1.50G`` or, of few, ``512``; 0 where nothing was measured."""
    with suppress(ValueError):
        return parse_memory(f"{text}B")
    return 0
