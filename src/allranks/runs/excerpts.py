"""Finds in the logs of an attempt's jobs and agents why it ended, or why its set-up failed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from allranks import contract
from allranks.logs.cause import LogExcerpt, find_cause, launcher_causes, tail

#: Bytes to read from the end of a log; our own logs are shorter.
_TAIL_BYTES = 1 << 20
#: Lines that are never a cause: bash's messages on signals, and other output of agents and the supervisor.
NOISE = re.compile(r"Terminated$|(?:allranks: )?(?:node \d+: )?[A-Z_]+=\S*: |allranks: (?:an|no )other attempt")

#: The message of a script about a failed line of the set-up: see plan/script.py.
_FAILED = re.compile(r"allranks: (.*) failed with exit code (\d+) \((.*), line (\d+)(?:, on (\S+))?\)")
_NOT_THERE = re.compile(r"allranks: (environment\.\w+: there is no [^;]+); (.+)")
#: What SetupFailure.what says of such a line.
FAILED_LINE = re.compile(r"(?:on \S+: )?line \d+ of .* failed: ")
_KEY = re.compile(r"# environment\.\w+$")
#: A line of an agent's log about a variable that it set.
_SETTING = re.compile(r"(?:node \d+: )?[A-Z_]+=\S*: ")


def with_text(patterns: Iterable[str]) -> list[Path]:
    """Return the non-empty files that match absolute patterns; for each pattern the newest first."""
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
    """Return the last non-blank lines of a log that the newest attempt wrote; empty if it is missing."""
    lines = list[str]()
    for line in tail(log, most=_TAIL_BYTES):
        if line.endswith(contract.ATTEMPT_STARTS):  # The last line of the previous attempt may be incomplete.
            lines.clear()
        elif line.strip():
            lines.append(line)
    return lines


def excerpt(logs: Iterable[Path], noise: re.Pattern[str]) -> LogExcerpt:
    """Find lines that may explain the end of the newest attempt; ``noise`` matches the start of irrelevant lines.

    Returns at most two lines of the first log that has any, else its last line. Lines from before the attempt are
    ignored.
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


# --- the set-up of a node, before its agent starts ---


class SetupFailure(NamedTuple):
    """Why a set-up failed before the agent started: what failed, its exit code, and the fix if known."""

    what: str
    code: int = 1
    fix: str = ""


def agent_excerpt(folder: Path) -> LogExcerpt:
    """Find in the log of a node's agent, or of torch's launcher instead, why it ended."""
    launcher_log = folder / contract.rank_log(contract.ALL_OF_A_NODE, "err")
    if launcher_log.exists() and (found := launcher_causes(launcher_log)):
        return LogExcerpt(launcher_log, found)
    log = folder / contract.AGENT_LOG
    lines, failure = tail(log), failed_setup(folder)
    last = find_cause(lines[:-1] if failure else lines)  # The failed line is named anyway.
    is_cause = last is not None and not _SETTING.match(last)
    causes = [last] if last and is_cause else []
    return LogExcerpt(log if log.exists() else None, causes, failure.fix if failure else "")


def failed_setup(folder: Path) -> SetupFailure | None:
    """Return how the set-up in a node's script failed; None if the agent was started."""
    return failure_in(next(reversed(tail(folder / contract.AGENT_LOG)), ""), folder)


def failure_in(line: str, folder: Path, script: Path | None = None) -> SetupFailure | None:
    """Parse the message of a script about a failed line of its set-up; None if ``line`` is no such message.

    Script names are relative to ``folder``; ``script`` is the local copy of a script that ran on another machine.
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
    """Find in a job's logs how the set-up of an attempt failed, and its output before; None if it did not fail.

    Args:
        logs: logs to search; the first one with the message counts.
        folder: directory of the run.
        noise: start of irrelevant lines of the scheduler.
    """
    for log in filter(Path.exists, logs):
        lines = [line for line in lines_of(log) if not (NOISE.match(line) or noise.match(line))]
        for at, line in enumerate(lines):
            if failure := failure_in(line, folder):
                cause = find_cause(lines[:at])
                return failure, LogExcerpt(log, [cause] if cause else [], failure.fix)
    return None


def _key_of(script: Path, number: int) -> str:
    """Return the key of the job file, and its line there, from which a line of a script was generated.

    For a line of a file that the set-up sources, the file is named instead.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = script.read_text(errors="replace").splitlines()[:number]
    at, key = next(((at, line[2:]) for at, line in reversed([*enumerate(lines, 1)]) if _KEY.match(line)), (0, ""))
    return f"line {number - at} of {key}" if "setup" in key else key or f"line {number} of {script.name}"
