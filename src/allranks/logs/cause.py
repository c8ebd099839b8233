"""Finds in a process's stderr why it ended. That is rarely the last line.

Libraries write hints, C++ frames, warnings of leaks or the path of a log after the error. So each kind of report is
recognised by its start, and its first line is the cause. Without a report, the last relevant line is the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import NamedTuple

from allranks.system.processes import rank_ended

_TAIL_BYTES = 65536
_LONGEST = 500
#: Prefix that torch adds to each line of a traceback if there is a process group (``_distributed_excepthook``).
_RANK = re.compile(r"^\[rank\d+\]: ?")
#: Start of a traceback, and the line before tracebacks of destructors and exit handlers, which end no process.
_TRACEBACK, _IGNORED = "Traceback (most recent call last):", re.compile(r"Exception ignored |Error in atexit")
#: An exception group (PEP 654): its border, the prefix of its lines, and the end of its own line.
_BORDER = re.compile(r" *\+[-+]+(?: \d+ -+)?$")
_IN_GROUP, _IS_GROUP = re.compile(r" *[|+] ?"), re.compile(r" \(\d+ sub-exceptions?\)")
_TERMINATED = re.compile(r"terminate called after throwing an instance of ")
_FATAL = re.compile(r"Fatal Python error: ")
#: Prefix of the reason for which NCCL's watchdog ends the process.
_WATCHDOG = re.compile(r".*(?:watchdog thread terminated with exception: (?:\[Rank \d+\] )?|(?=Watchdog caught ))")
#: Reports of an abort without its cause.
_ONLY_AN_ABORT = re.compile(r"Fatal Python error: Aborted|terminate called without an active exception")
#: An exception's own line without a traceback.
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: |$)")
#: Lines that are never a cause: frames, hints, warnings of leaks, logs and progress.
_NO_CAUSE = re.compile(
    r"\s|\W*$|(?:frame )?#\d+:? |Exception raised from |C\+\+ CapturedTraceback:|Extension modules: "
    r"|CUDA kernel errors might be |For debugging consider passing CUDA_|Compile with .TORCH_USE_CUDA_DSA"
    r"|Set the environment variable HYDRA_FULL_ERROR|wandb:|.*resource_tracker|.*:\d+: \w*Warning: "
    r"|\[?[IW]\d{4} |(?:.{0,40}[ \[|])?(?:INFO|DEBUG)[\]: |]|.*\d%\|"
)
#: Prefix of the first line of an allranks error.
_OURS = re.compile(r"^(?:allranks\.errors\.\w+: |allranks: (?:error: )?)")
#: Place of an error in gloo's source.
_SOURCE = re.compile(r"\[/\S+:\d+\] ")
#: A frame of a traceback or of faulthandler's stack; files that are not the user's: of packages, Python or allranks.
_FRAME = re.compile(r' *File "([^"]+)", line (\d+)')
_FOREIGN = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|^<|/allranks/(?:(?:agent|record|runtime|selftest|system)/|(?:lightning|__init__)\.py)"
)

#: A frame of torch's launcher, which runs by ``python -m``: the last traceback with it is the launcher's.
_ITS_OWN = "_run_module_as_main"
#: The launcher's log lines on ranks that it ends, and the C++ library's message on an abort.
_LAUNCHER = re.compile(r"torch[./]distributed[./]elastic|^terminate called ")
#: A warning of the launcher; its source line follows, indented.
_LAUNCHER_WARNS = re.compile(r"torch/distributed/launch\.py:\d+: \w*Warning")
#: The end of torchrun's report: which rank was the first to fail.
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)


class LogExcerpt(NamedTuple):
    """Excerpt of a cluster's own log on the end of a run that no rank has caused.

    Attributes:
        log: path of the log; None if there is none.
        causes: lines that may give the reason, oldest first.
        fix: what to do, if known; ``{run}`` stands for the run's name in a command.
    """

    log: Path | None = None
    causes: Sequence[str] = ()
    fix: str = ""


def cause_of(path: Path, *, is_any: bool = True) -> str | None:
    """Return the cause in a log for the end of its process; None if there is none.

    Args:
        path: the log.
        is_any: without an exception, the last relevant line is the cause.
    """
    return find_cause(tail(path), is_any=is_any)


def tail(path: Path, most: int = _TAIL_BYTES) -> list[str]:
    """Return the lines in the last ``most`` bytes of a file; empty if it is missing."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - most))
            return stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def find_cause(lines: Iterable[str], *, is_any: bool = True) -> str | None:
    """Return the line with the cause of a process's end, and the place in the user's code; None if there is none."""
    plain = [_RANK.sub("", line).rstrip() for line in lines]
    reports = [*_reports(plain)]
    clear = [report for report in reports if not _ONLY_AN_ABORT.match(report)]
    found = clear or [*_errors(plain)] or reports
    if is_any:
        found = found or [line for line in plain if not _NO_CAUSE.match(line)]
    return _SOURCE.sub("", _OURS.sub("", found[-1]), count=1)[:_LONGEST] if found else None


def own_fix(lines: Iterable[str], cause: str) -> str | None:
    """Return the fix of the allranks error whose first line is ``cause``; None if there is none."""
    plain = [_RANK.sub("", line).rstrip() for line in lines]
    for at, line in enumerate(plain):
        if _OURS.match(line) and _OURS.sub("", line) == cause:
            rest = takewhile(lambda after: after.startswith("  "), plain[at + 1 :])
            return next((after.removeprefix("  fix: ") for after in rest if after.startswith("  fix: ")), None)
    return None


def is_foreign(file: str) -> bool:
    """Return True if a file in a traceback belongs to a package, Python or allranks, not to the user."""
    return bool(_FOREIGN.search(file))


def _reports(lines: Sequence[str]) -> Iterator[str]:
    """Yield the causes in reports of exceptions, aborts and timeouts, in order."""
    for at, line in enumerate(lines):
        if line.endswith(_TRACEBACK) and line.startswith("  + Exception Group"):
            yield "; ".join(_of_group(lines[at + 1 :]))
        elif line.endswith(_TRACEBACK) and line[0] != " ":
            if not (at and _IGNORED.match(lines[at - 1])):
                yield from _of_traceback(lines[at + 1 :])
        elif _TERMINATED.match(line):
            what = lines[at + 1].partition("what(): ")[2].strip() if at + 1 < len(lines) else ""
            yield _WATCHDOG.sub("", what, count=1) or line
        elif _WATCHDOG.match(line):
            yield _WATCHDOG.sub("", line, count=1)
        elif _FATAL.match(line):
            yield line + _place(reversed(lines[at + 1 :]))  # Its stack has the innermost frame first.
        elif _ONLY_AN_ABORT.match(line):
            yield line


def _of_traceback(after: Sequence[str]) -> Iterator[str]:
    """Yield the exception's own line of a traceback, with its place."""
    frames = [*takewhile(lambda line: not line or line[0] == " ", after)]
    line, *more = after[len(frames) :] or [""]
    if line.endswith(":"):  # Its message starts with an empty line.
        line += next((f" {text.strip()}" for text in more if text.strip()), "")
    if line:
        yield line if _OURS.match(line) else line + _place(frames)


def _of_group(after: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the innermost exceptions of a group."""
    inside = [*takewhile(_IN_GROUP.match, after)]
    borders = [at for at, line in enumerate(inside) if _BORDER.match(line)]
    for begin, end in pairwise(borders):
        part = [_IN_GROUP.sub("", line, count=1) for line in inside[begin + 1 : end]]
        starts = [at + 1 for at, line in enumerate(part) if line.endswith(_TRACEBACK)]
        yield from (line for line in _of_traceback(part[max(starts, default=0) :]) if not _IS_GROUP.search(line))


def _errors(lines: Sequence[str]) -> Iterator[str]:
    """Yield lines that look like an exception's own line, such as that of a syntax error in a script."""
    for at, line in enumerate(lines):
        if _ERROR.match(line):
            yield line + _place([*takewhile(lambda before: before[:1] == " ", reversed(lines[:at]))][::-1])


def _place(frames: Iterable[str]) -> str:
    """Return the innermost frame in the user's code: `` (train.py:12)``; frames are given from outer to inner."""
    found = [frame.groups() for line in frames if (frame := _FRAME.match(line))]
    users = [f" ({Path(file).name}:{line})" for file, line in found if not is_foreign(file)]
    return users[-1] if users else ""


def launcher_causes(path: Path) -> list[str]:
    """Return why torch's launcher ended, from its and the ranks' stderr: a rank's last error, or its own report."""
    lines = tail(path)
    if cause := find_cause(_without_launcher(lines)):
        return [cause]
    return [rank_ended(int(rank), int(code)) for rank, code in _ROOT_CAUSE.findall("\n".join(lines))][-1:]


def _without_launcher(lines: Sequence[str]) -> Iterator[str]:
    starts = [at for at, line in enumerate(lines[:-1]) if line == _TRACEBACK and _ITS_OWN in lines[at + 1]]
    end = starts[-1] if starts else len(lines)
    warns = False
    for line in lines[:end]:
        warns = warns or bool(_LAUNCHER_WARNS.search(line))
        if not warns and not _LAUNCHER.search(line):
            yield line
        warns = warns and not line.startswith("  ")
