"""What the logs of an attempt's jobs and agents say of its end, and of a set-up that failed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from allranks import contract
from allranks.logs.cause import LogExcerpt, find_cause, launcher_causes, tail

#: More than any log of ours that is read to its end.
_TAIL_BYTES = 1 << 20
#: Tells no cause in any log: what bash prints of a signal, and what agents and the supervisor print besides.
NOISE = re.compile(r"Terminated$|(?:allranks: )?(?:node \d+: )?[A-Z_]+=\S*: |allranks: (?:an|no )other attempt")

#: How a script reports a line of the set-up that fails: see plan/script.py.
_FAILED = re.compile(r"allranks: (.*) failed with exit code (\d+) \((.*), line (\d+)(?:, on (\S+))?\)")
_NOT_THERE = re.compile(r"allranks: (environment\.\w+: there is no [^;]+); (.+)")
_KEY = re.compile(r"# environment\.\w+$")
#: A line of an agent's log about a variable that it has set.
_SETTING = re.compile(r"(?:node \d+: )?[A-Z_]+=\S*: ")


def with_text(patterns: Iterable[str]) -> list[Path]:
    """Return the files that absolute patterns fit and that are not empty; of each pattern the newest first."""
    logs = list[Path]()
    for pattern in patterns:
        found = []
        for path in Path("/").glob(pattern.lstrip("/")):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found += [(stat.st_mtime, path)] if stat.st_size else []
        logs += (path for _, path in sorted(found, reverse=True))
    return logs


def lines_of(log: Path) -> list[str]:
    """Return the newest attempt's last lines of a log that are not blank; none if it is not there."""
    lines = list[str]()
    for line in tail(log, most=_TAIL_BYTES):
        if line.endswith(contract.ATTEMPT_STARTS):  # What the attempt before wrote last may be half a line.
            lines.clear()
        elif line.strip():
            lines.append(line)
    return lines


def excerpt(logs: Iterable[Path], noise: re.Pattern[str]) -> LogExcerpt:
    """Find in logs what may tell why the newest attempt ended; ``noise`` is how lines start that tell no cause.

    That is at most two lines of the first log that has such a line; else the last line. What was in a log before the
    attempt does not count.
    """
    found = LogExcerpt()
    for log in filter(Path.exists, logs):
        lines = [line for line in lines_of(log) if not NOISE.match(line)]
        causes = dict.fromkeys(line for line in lines if not (line[0].isspace() or noise.match(line)))
        if causes:
            return LogExcerpt(log, [line.removeprefix("allranks: ") for line in [*causes][-2:]])
        if lines and not found.causes:
            found = LogExcerpt(log, lines[-1:])
        elif found.log is None:
            found = LogExcerpt(log)
    return found


# --- the set-up of a node, which a script does before its agent starts ---


@dataclass(frozen=True)
class SetupFailure:
    """Why a set-up ended before the agent started: what failed, its exit code, and what to do, if that is known."""

    what: str
    code: int = 1
    fix: str = ""


def agent_excerpt(folder: Path) -> LogExcerpt:
    """Find in the log of a node's agent, or of torch's launcher in its place, why it ended."""
    launcher_log = folder / contract.rank_log(contract.ALL_OF_A_NODE, "err")
    if launcher_log.exists() and (found := launcher_causes(launcher_log)):
        return LogExcerpt(launcher_log, found)
    log = folder / contract.AGENT_LOG
    lines, failure = tail(log), failed_setup(folder)
    last = find_cause(lines[:-1] if failure else lines)  # The line that failed is named anyway.
    is_cause = last is not None and not _SETTING.match(last)
    causes = [last] if last and is_cause else []
    return LogExcerpt(log if log.exists() else None, causes, failure.fix if failure else "")


def failed_setup(folder: Path) -> SetupFailure | None:
    """Return how the set-up in a node's script ended, if that was before its agent started."""
    return failure_in(next(reversed(tail(folder / contract.AGENT_LOG)), ""), folder)


def failure_in(line: str, folder: Path, script: Path | None = None) -> SetupFailure | None:
    """Return which line of a set-up failed, by the ``line`` that its script wrote of it; None if it is no such line.

    Names of scripts are relative to ``folder``; ``script`` is a copy here of one that ran on another machine.
    """
    if found := _NOT_THERE.fullmatch(line):
        return SetupFailure(found[1], fix=found[2])
    if found := _FAILED.fullmatch(line):
        command, code, file, number, host = found.groups()
        ran = script if script and script.name == Path(file).name else folder / file
        on = f"on {host}: " if host else ""
        return SetupFailure(f"{on}{_key_of(ran, int(number))} failed: {command.rstrip()}", int(code))
    return None


def setup_failure(logs: Iterable[Path], folder: Path, noise: re.Pattern[str]) -> tuple[SetupFailure, LogExcerpt] | None:
    """Return how the set-up of an attempt failed by its job's logs, and what it said before; None if it did not.

    Args:
        logs: to search, the first one that tells it counts.
        folder: the run's.
        noise: how lines of its scheduler start that tell no cause.
    """
    for log in filter(Path.exists, logs):
        lines = [line for line in lines_of(log) if not (NOISE.match(line) or noise.match(line))]
        for at, line in enumerate(lines):
            if failure := failure_in(line, folder):
                cause = find_cause(lines[:at])
                return failure, LogExcerpt(log, [cause] if cause else [], failure.fix)
    return None


def _key_of(script: Path, number: int) -> str:
    """Return which key of the job file has brought a line of a script, and which of its lines it is.

    A file that the set-up reads has no such key: then it is named.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = script.read_text(errors="replace").splitlines()[:number]
    at, key = next(((at, line[2:]) for at, line in reversed([*enumerate(lines, 1)]) if _KEY.match(line)), (0, ""))
    return f"line {number - at} of {key}" if "setup" in key else key or f"line {number} of {script.name}"
