"""PBS' commands and their answers: for each a function that builds it, and one that reads what it says.

OpenPBS and PBS Pro are asked for JSON. Their own writer of it escapes neither all quotes nor all backslashes of the
user's variables, and writes values such as ``nan`` bare; where it cannot be read, the plain format is asked for, which
is Torque's only one. Times are read as UTC, because :func:`look_up` asks in UTC.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from allranks.clusters import asking, pbs_ended, pbs_errors, pbs_words
from allranks.clusters.job_info import overall
from allranks.clusters.reason import Reason
from allranks.errors import LaunchError
from allranks.job.units import parse_memory
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.job.spec import Job

SUBMIT = "qsub"
#: Of PBS: OpenPBS and PBS Pro are asked alike.
Flavour = Literal["openpbs", "torque"]
#: A server under load may take long to answer.
_SECONDS = 90.0
#: How long to wait before another try, where PBS could not be reached just then.
_PAUSES = (0.2, 0.5)

_SUBMITTED = re.compile(r"^\s*(\d+(?:\[\d*\])?\.[\w.-]+)\s*$", re.MULTILINE)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DATE = re.compile(r"\w{3} (\w{3}) +(\d+) (\d+):(\d+):(\d+) (\d{4})")
_PLAIN_LINE = re.compile(r"^    (\w+(?:\.\w+)?) = (.*)$", re.MULTILINE)
_FLAVOURS: dict[str, Flavour] = {}


@dataclass(frozen=True)
class JobInfo:
    """What PBS knows of a job. Times are in seconds since 1970, memory in bytes.

    Attributes:
        job_id: its id, as qsub prints it: ``12.server``; of an array ``12[].server``, of its subjobs ``12[3].server``.
        state: our state.
        native: PBS' letter for it, with what that stands for.
        word: the comment, in which PBS says why it waits and how it ended.
        exit_code: what the script ended with, if it ended by itself.
        signal: the signal that ended it, if one did.
        started: when it got its nodes; None while it waits.
        ended: when it ended; None before.
        peak_memory: the most that it used, on all nodes together.
        held: its holds, a letter for each.
        depend: what it depends on, as PBS writes it.
        cause: why it ended so, where there is something to say.
    """

    job_id: str
    state: State
    native: str
    word: str = ""
    exit_code: int | None = None
    signal: int | None = None
    started: float | None = None
    ended: float | None = None
    peak_memory: int | None = None
    held: str = ""
    depend: str = ""
    cause: Reason | None = None

    @property
    def why(self) -> Reason | None:
        """Why the job waits, or why it ended so, where PBS tells more than the state does."""
        letter = self.native[:1]
        if letter in pbs_words.ENDED:
            return self.cause
        reason = pbs_words.reason_of(letter, self.word, self.held, self.depend)
        return replace(reason, fix=reason.fix.format(job=self.job_id)) if reason else None

    @property
    def reason(self) -> str | None:
        """:attr:`why` in a sentence, with what can be done."""
        return str(self.why) if self.why else None


def cancel_command(job_id: str) -> tuple[str, ...]:
    """Build the command that cancels a job."""
    return ("qdel", job_id)


def show_command(job_id: str, *, flavour: Flavour = "openpbs") -> tuple[str, ...]:
    """Build the command that shows a person all that PBS knows of a job."""
    return ("qstat", *(("-x",) if flavour == "openpbs" else ()), "-f", job_id)


def parse_submitted(text: str) -> str:
    """Return the id in qsub's answer: ``12.server``, or ``12[].server`` of an array.

    Raises:
        LaunchError: there is none.
    """
    found = _SUBMITTED.findall(text)
    if not found:
        raise pbs_errors.PBS.no_id(text)
    return str(found[-1])  # A site's own messages come before.


def parse_json(text: str) -> tuple[JobInfo, ...]:
    """Read what ``qstat -f -F json`` says: one job, or an array and its subjobs.

    Raises:
        ValueError: it is no JSON.
    """
    answer = json.loads(text, strict=False)
    if not isinstance(answer, dict):
        raise ValueError("the answer is no object")
    jobs: Mapping[str, Mapping[str, object]] = answer.get("Jobs", {})
    return tuple(_info(job_id, _flat(fields)) for job_id, fields in jobs.items())


def _flat(fields: Mapping[str, object]) -> dict[str, str]:
    """Return the fields as the plain format names them, in small letters, as Torque writes some of them."""
    flat: dict[str, str] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}".lower(): str(told) for inner, told in value.items()}
        else:
            flat[name.lower()] = str(value)
    return flat


def parse_plain(text: str) -> tuple[JobInfo, ...]:
    """Read what ``qstat -f`` says: one job, or an array and its subjobs. Long lines may be wrapped, or not.

    A variable of the user's may hold lines that look like PBS' own. Those before the variables count first, and of
    those after their begin the last.
    """
    jobs = []
    for part in re.split(r"^Job Id: *", text.replace("\n\t", ""), flags=re.MULTILINE)[1:]:
        job_id, _, rest = part.partition("\n")
        before, _, after = rest.partition("\n    Variable_List = ")
        lines = _PLAIN_LINE.findall(after) + _PLAIN_LINE.findall(before)
        jobs.append(_info(job_id.strip(), {name.lower(): value for name, value in lines}))
    return tuple(jobs)


def _info(job_id: str, fields: Mapping[str, str]) -> JobInfo:
    letter = fields.get("job_state", "")
    info = JobInfo(
        job_id,
        pbs_words.state_of(letter),
        pbs_words.native_of(letter),
        word=fields.get("comment", "").strip(),
        held=fields.get("hold_types", "").replace("n", ""),
        depend=fields.get("depend", ""),
    )
    if info.state is State.PENDING:
        return info
    info = replace(
        info,
        started=_time(fields, "stime", "start_time"),
        peak_memory=_memory(fields.get("resources_used.mem", "")),
    )
    return _ended(info, fields) if letter in pbs_words.ENDED else info


def _ended(info: JobInfo, fields: Mapping[str, str]) -> JobInfo:
    how = pbs_ended.ending(fields)
    ended = _time(fields, "obittime", "comp_time", "history_timestamp", "mtime")
    return replace(info, state=how.state, exit_code=how.exit_code, signal=how.signal, cause=how.cause, ended=ended)


def _time(fields: Mapping[str, str], *names: str) -> float | None:
    """Return the first of the times that is there, in seconds since 1970."""
    text = next((fields[name] for name in names if name in fields), "")
    if text.isdecimal():
        return float(text)
    found = _DATE.fullmatch(text)
    if not found or found[1] not in _MONTHS:
        return None
    day, hour, minute, second, year = (int(part) for part in found.groups()[1:])
    return datetime(year, _MONTHS.index(found[1]) + 1, day, hour, minute, second, tzinfo=timezone.utc).timestamp()


def _memory(size: str) -> int | None:
    """Return the bytes in ``10744kb``; None where nothing was measured."""
    with suppress(ValueError):
        return parse_memory(size)
    return None


def flavour(environ: Mapping[str, str]) -> Flavour | None:
    """Tell which PBS is here, by what its qstat says of itself; each qstat is asked once.

    Returns None where there is no qstat.

    Raises:
        LaunchError: this qstat is not PBS'.
    """
    place = shutil.which("qstat", path=environ.get("PATH"))
    if place is None:
        return None
    if place not in _FLAVOURS:
        done = asking.run((place, "--version"), environ, pbs_errors.PBS, seconds=_SECONDS)
        _FLAVOURS[place] = _flavour_of(done.stdout + done.stderr)
    return _FLAVOURS[place]


def flavour_for(job: Job, environ: Mapping[str, str]) -> Flavour:
    """Return which PBS a job is for: the one that is said, else the one that is here, else OpenPBS.

    Raises:
        LaunchError: the qstat that is here is not PBS'.
    """
    return job.scheduler.flavour or flavour(environ) or "openpbs"


def _flavour_of(said: str) -> Flavour:
    if re.search(r"pbs_version *=", said):
        return "openpbs"
    if re.search(r"(?im)^version: *\d", said):
        return "torque"
    if re.search(r"(?i)grid ?engine|\b(?:SGE|UGE|AGE|OGE|OGS)\b|invalid option argument", said):
        raise LaunchError("this qstat is Grid Engine's", fix="the kind pbs is for OpenPBS, PBS Pro and Torque")
    raise LaunchError(
        "this qstat is not PBS'",
        why=f"qstat --version said {said.strip()[:200]!r}",
        fix="put the folder of PBS' commands first in PATH; where Slurm brings this qstat, use the kind slurm",
    )


def ask(
    command: Sequence[str], environ: Mapping[str, str], *, cwd: str | Path | None = None, seconds: float = _SECONDS
) -> str:
    """Run a command of PBS' and return its answer.

    Raises:
        LaunchError: the command is not there, PBS cannot be reached, or it refuses.
    """
    return asking.ask(command, environ, pbs_errors.PBS, cwd=cwd, seconds=seconds)


_Reader = Callable[[str], tuple[JobInfo, ...]]
#: Options of qstat that tell all of a job, the best first, and what reads the answer. Without -w lines are wrapped, and
#: a line of a variable's may look like one of PBS'; versions before -w and JSON have neither.
_ASKED: dict[Flavour, tuple[tuple[tuple[str, ...], _Reader], ...]] = {
    "openpbs": (
        (("-x", "-f", "-F", "json"), parse_json),
        (("-x", "-f", "-w"), parse_plain),
        (("-x", "-f"), parse_plain),
    ),
    "torque": ((("-f",), parse_plain),),
}


def delete(job_id: str, environ: Mapping[str, str]) -> None:
    """Cancel a job; one that has ended meanwhile is none to cancel.

    Raises:
        LaunchError: PBS cannot be reached, or refuses.
    """
    command = cancel_command(job_id)
    done = asking.run(command, environ, pbs_errors.PBS, seconds=_SECONDS)
    if done.returncode and not _is_gone(done):
        raise pbs_errors.PBS.refusal(command, done.returncode, done.stdout + done.stderr)


def look_up(job_id: str, environ: Mapping[str, str] | None = None) -> JobInfo | None:
    """Ask what has become of a job; of an array, of that task which tells how the array stands.

    Returns None when PBS does not know it: after its end that is so at once where PBS keeps no history.

    Raises:
        LaunchError: PBS cannot be reached, or refuses to tell.
    """
    in_utc = {**(os.environ if environ is None else environ), "TZ": "UTC0"}
    has_history = True
    for options, read in _ASKED[flavour(in_utc) or "openpbs"]:
        command = ("qstat", *options, *(("-t",) if "[]" in job_id else ()), job_id)
        done = _tried(command if has_history else _without_history(command), in_utc)
        if has_history and pbs_errors.has_no_history(done.stdout + done.stderr):
            has_history = False
            done = _tried(_without_history(command), in_utc)
        if pbs_errors.is_not_understood(done.returncode, done.stderr):
            continue
        if _is_gone(done):
            return None
        if done.returncode:
            raise pbs_errors.PBS.refusal(command, done.returncode, done.stderr)
        with suppress(ValueError):
            return _overall(read(done.stdout))
    raise LaunchError(f"qstat told nothing of job {job_id} that can be read", fix="qstat --version tells which it is")


def _without_history(command: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in command if word != "-x")


def _is_gone(done: subprocess.CompletedProcess[str]) -> bool:
    told = done.returncode, done.stderr
    return pbs_errors.is_unknown(*told) or pbs_errors.has_finished(*told)


def _tried(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command, and try again where PBS could not be reached just then."""
    for pause in _PAUSES:
        done = asking.run(command, environ, pbs_errors.PBS, seconds=_SECONDS)
        if not pbs_errors.is_passing(done.returncode, done.stderr):
            return done
        time.sleep(pause)
    return asking.run(command, environ, pbs_errors.PBS, seconds=_SECONDS)


def _overall(jobs: Iterable[JobInfo]) -> JobInfo | None:
    """Return the task that tells how an array stands: one that runs, else one that waits, else one that failed.

    What PBS tells of the array as a whole counts only where it tells of no task.
    """
    all_of_it = tuple(jobs)
    tasks = tuple(job for job in all_of_it if "[]" not in job.job_id) or all_of_it
    return overall(tasks)
