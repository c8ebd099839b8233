"""Why a process ended, from its stderr: rarely the last line.

Libraries write after the error: hints, C++ frames, warnings of leaks, the address of a log. So each kind of report is
recognised by its start, and its own first line is the cause. Without a report, the last line of another kind is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

from allranks.system.processes import rank_ended

_TAIL_BYTES = 65536
_LONGEST = 500
#: What torch puts before each line of a traceback once there is a process group (``_distributed_excepthook``).
_RANK = re.compile(r"^\[rank\d+\]: ?")
#: How Python's tracebacks start, and the line before those of destructors and exit handlers, which end no process.
_TRACEBACK, _IGNORED = "Traceback (most recent call last):", re.compile(r"Exception ignored |Error in atexit")
#: An exception group (PEP 654): its border, what stands before its lines, and what closes its own line.
_BORDER = re.compile(r" *\+[-+]+(?: \d+ -+)?$")
_IN_GROUP, _IS_GROUP = re.compile(r" *[|+] ?"), re.compile(r" \(\d+ sub-exceptions?\)")
_TERMINATED = re.compile(r"terminate called after throwing an instance of ")
_FATAL = re.compile(r"Fatal Python error: ")
#: What NCCL's watchdog puts before the reason for which it ends the process.
_WATCHDOG = re.compile(r".*(?:watchdog thread terminated with exception: (?:\[Rank \d+\] )?|(?=Watchdog caught ))")
#: Reports of an abort that do not name its cause.
_ONLY_AN_ABORT = re.compile(r"Fatal Python error: Aborted|terminate called without an active exception")
#: An exception's own line, where no traceback stands before it.
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: |$)")
#: Lines that are no cause: frames, hints, warnings of leaks, logs and progress.
_NO_CAUSE = re.compile(
    r"\s|\W*$|(?:frame )?#\d+:? |Exception raised from |C\+\+ CapturedTraceback:|Extension modules: "
    r"|CUDA kernel errors might be |For debugging consider passing CUDA_|Compile with .TORCH_USE_CUDA_DSA"
    r"|Set the environment variable HYDRA_FULL_ERROR|wandb:|.*resource_tracker|.*:\d+: \w*Warning: "
    r"|\[?[IW]\d{4} |(?:.{0,40}[ \[|])?(?:INFO|DEBUG)[\]: |]|.*\d%\|"
)
#: What stands before the first line of an error of ours.
_OURS = re.compile(r"^(?:allranks\.errors\.\w+: |allranks: (?:error: )?)")
#: Where in its own source gloo has found an error.
_SOURCE = re.compile(r"\[/\S+:\d+\] ")
#: A frame of a traceback or of faulthandler's stack; files that are no user's: of packages, of Python, of ours.
_FRAME = re.compile(r' *File "([^"]+)", line (\d+)')
_FOREIGN = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|^<|/allranks/(?:(?:agent|record|runtime|selftest|system)/|(?:lightning|__init__)\.py)"
)

#: In the traceback of torch's own launcher, which was started by ``python -m``. The last one is its own.
_ITS_OWN = "_run_module_as_main"
#: What it logs of the ranks that it ends, and what the C++ library says of a process that is aborted.
_LAUNCHER = re.compile(r"torch[./]distributed[./]elastic|^terminate called ")
#: A warning of its own, which ends with the line of its source, indented.
_LAUNCHER_WARNS = re.compile(r"torch/distributed/launch\.py:\d+: \w*Warning")
#: The end of torchrun's report: which rank was the first to fail.
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)


@dataclass(frozen=True)
class LogExcerpt:
    """Excerpt of a cluster's own log on how a run ended that no rank has ended.

    Attributes:
        log: the log, if there is one.
        causes: lines of it that may say why, oldest first.
        fix: what to do about it, if known; ``{run}`` stands for the run's name in a command.
    """

    log: Path | None = None
    causes: Sequence[str] = ()
    fix: str = ""


def cause_of(path: Path) -> str | None:
    """Return from a log why its process ended; None if it does not say."""
    return find_cause(tail(path))


def tail(path: Path, most: int = _TAIL_BYTES) -> list[str]:
    """Return the lines of a file's last bytes, at most so many; none if it is not there."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - most))
            return stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def find_cause(lines: Iterable[str]) -> str | None:
    """Return the line that says why a process ended, with the place in the user's code; None if there is none."""
    plain = [_RANK.sub("", line).rstrip() for line in lines]
    reports = [*_reports(plain)]
    clear = [report for report in reports if not _ONLY_AN_ABORT.match(report)]
    found = clear or [*_errors(plain)] or reports or [line for line in plain if not _NO_CAUSE.match(line)]
    return _SOURCE.sub("", _OURS.sub("", found[-1]), count=1)[:_LONGEST] if found else None


def own_fix(lines: Iterable[str], cause: str) -> str | None:
    """Return what an error of ours in a log says to do, whose first line is the cause; None if there is none."""
    plain = [_RANK.sub("", line).rstrip() for line in lines]
    for at, line in enumerate(plain):
        if _OURS.match(line) and _OURS.sub("", line) == cause:
            rest = takewhile(lambda after: after.startswith("  "), plain[at + 1 :])
            return next((after.removeprefix("  fix: ") for after in rest if after.startswith("  fix: ")), None)
    return None


def is_foreign(file: str) -> bool:
    """Return True if a file of a traceback is of a package, of Python or of allranks, and not the user's own."""
    return bool(_FOREIGN.search(file))


def _reports(lines: Sequence[str]) -> Iterator[str]:
    """Yield the causes that reports of exceptions, aborts and timeouts name, in their order."""
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
    if line.endswith(":"):  # Its message begins with an empty line.
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
    """Yield the lines that look like an exception's own, such as that of a script's wrong syntax."""
    for at, line in enumerate(lines):
        if _ERROR.match(line):
            yield line + _place([*takewhile(lambda before: before[:1] == " ", reversed(lines[:at]))][::-1])


def _place(frames: Iterable[str]) -> str:
    """Return the innermost of the frames, of which it is the last, that is in the user's code: `` (train.py:12)``."""
    found = [frame.groups() for line in frames if (frame := _FRAME.match(line))]
    users = [f" ({Path(file).name}:{line})" for file, line in found if not is_foreign(file)]
    return users[-1] if users else ""


def launcher_causes(path: Path) -> list[str]:
    """Return why torch's own launcher ended, from its and the ranks' stderr: a rank's last error, or its own report."""
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
