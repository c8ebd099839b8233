"""How the command line speaks: results on stdout, talk on stderr, colour only where a person looks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from allranks.errors import AllranksError
from allranks.job.units import format_count
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.plan.plan import Plan

_BOLD, _RED, _DIM, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[2m", "\x1b[0m"
_GREEN, _YELLOW, _BLUE = "\x1b[32m", "\x1b[33m", "\x1b[34m"

_GRADES = {"PASS": _GREEN, "WARN": _YELLOW, "FAIL": _BOLD + _RED, "SKIP": _DIM}
#: All other states are red.
_STATES = {State.SUCCEEDED: _GREEN, State.RUNNING: _BLUE} | dict.fromkeys(
    (State.PENDING, State.CANCELLED, State.PREEMPTED, State.UNKNOWN), _YELLOW
)

#: What a terminal obeys: colour (SGR, group 1), which stays; other control sequences, such as cursor moves (ECMA-48);
#: and single control characters, also those of C1, as text or as bytes that are no text. Tabs, carriage returns and
#: line breaks are none of them.
_OBEYED = re.compile(r"(\x1b\[[0-9;:]*m)|(\x1b\[[0-?]*[ -/]*[@-~])|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\udc80-\udc9f]")


def is_lively(stream: IO[Any]) -> bool:
    """Tell whether a terminal that can move its cursor is behind ``stream``."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def has_colour(stream: IO[Any]) -> bool:
    """Tell whether to use colour on ``stream`` (no-color.org)."""
    return is_lively(stream) and not os.environ.get("NO_COLOR")


def talk(text: str) -> None:
    """Say something on stderr; a terminal that is gone is no reason to fail. Signal handlers may call it."""
    wipe = "\r\x1b[K" if is_lively(sys.stderr) else ""  # A progress bar, or the ^C that the terminal showed.
    with contextlib.suppress(OSError):
        os.write(2, f"{wipe}{harmless(text)}\n".encode(errors="replace"))


def harmless(text: str) -> str:
    """Make a text one that a terminal shows: of what it would obey, colours stay, and cursor moves are left out.

    Single control characters are written out. What comes from nodes and logs may hold any.
    """
    return _OBEYED.sub(_shown, text)


def one_line(text: str) -> str:
    """Make a text harmless and one line, as the name that a host has given itself may not be."""
    return harmless(text).replace("\n", r"\n").replace("\r", r"\r")


def _shown(found: re.Match[str]) -> str:
    if found[1] or found[2]:
        return found[1] or ""
    return f"\\x{ord(found[0]) & 0xFF:02x}"


def data(text: str) -> None:
    """Write a result to stdout: as it is into a file or a pipe, which may be a script, and harmless to a terminal.

    Raises:
        AllranksError: it cannot be written: the disk behind it is full, say.
    """
    _print(harmless(text) if sys.stdout.isatty() else text)


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except UnicodeEncodeError:  # A file name that is no text, or a terminal that knows few letters.
        print(text.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding), flush=True)
    except BrokenPipeError:
        raise
    except OSError as failure:
        raise AllranksError("cannot write to stdout", why=failure.strerror) from failure


def frame(text: str) -> None:
    """Show a text on a cleared terminal, cut to its size."""
    lines = harmless(text).splitlines()[: frame_lines()]
    _print("\x1b[H\x1b[2J" + "\n".join(map(_cut, lines)))


def frame_lines() -> int:
    """Return how many lines a frame has at most."""
    return shutil.get_terminal_size().lines - 1


def rows(text: str) -> None:
    """Write lines as a result to stdout, each cut to the terminal's width where there is one."""
    data("\n".join(map(_cut, text.splitlines())) if sys.stdout.isatty() else text)


def _cut(line: str) -> str:
    """Cut a line at its end, where there are no colours, to the terminal's width."""
    excess = _width(line) - shutil.get_terminal_size().columns
    return line if excess <= 0 else f"{line[: -excess - 1]}…{_PLAIN if _PLAIN in line else ''}"


def _width(text: str) -> int:
    """Return the columns that a text takes: colours take none."""
    return len(_OBEYED.sub("", text))


def as_json(value: Any) -> None:
    """Write a result to stdout as JSON."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # JSON itself escapes those below.
    text = re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2)
    data(text)


def error(failure: AllranksError) -> None:
    """Show an error on stderr: what, why, fix, see."""
    label = f"{_BOLD}{_RED}error:{_PLAIN} " if has_colour(sys.stderr) else "error: "
    talk(label + printable(str(failure)))


def printable(text: str) -> str:
    """Replace what a terminal would obey instead of show; line breaks stay."""
    return "".join(char if char == "\n" or char.isprintable() else repr(char)[1:-1] for char in text)


def unexpected(failure: Exception) -> AllranksError:
    """Save the traceback of a failure that nobody foresaw, and make an error that names the file."""
    import tempfile
    import traceback

    text = "".join(traceback.format_exception(failure))
    what = f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__
    why = "this is a mistake in allranks"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="allranks-", suffix=".log", delete=False, errors="backslashreplace"
        ) as stream:
            stream.write(text)
    except OSError as full:
        return AllranksError(what, why=f"{why}; its traceback cannot be saved: {full.strerror}", see=text.rstrip())
    return AllranksError(what, why=why, fix="please report it with that file", see=stream.name)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align rows under a header; the last column is as wide as it is."""
    lines = [list(header), *(list(map(one_line, row)) for row in rows)]
    widths = [max(_width(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Align values behind their names."""
    found = [(name, one_line(value)) for name, value in rows]
    width = max(len(name) for name, _ in found)
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in found)


def seconds(amount: float) -> str:
    """Write a span of time the way people say it: 8.2 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if amount < 60:
        return f"{amount:.1f} s"
    minutes, second = divmod(round(amount), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hours} h {minute} min" if hours else f"{minutes} min {second} s"


def ranks(plan: Plan) -> str:
    """Write how many ranks there will be: 4 ranks, 2 to 8 ranks, as many ranks as the nodes have GPUs."""
    if plan.ranks_unknown:
        return "as many ranks as the nodes have GPUs"
    least = plan.min_nodes * plan.nproc_per_node if plan.min_nodes else plan.world_size
    return _counted(least, plan.world_size, "rank")


def nodes(plan: Plan) -> str:
    """Write how many nodes there will be: 2 nodes, 1 to 4 nodes, 2 nodes and 1 spare."""
    spares = f" and {format_count(plan.spares, 'spare')}" if plan.spares else ""
    return _counted(plan.min_nodes or plan.nnodes, plan.nnodes, "node") + spares


def _counted(least: int, most: int, noun: str) -> str:
    return ("" if least == most else f"{least} to ") + format_count(most, noun)


def moment(when: float | None) -> str:
    """Write a time of this machine's clock."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if when else "-"


def age(when: float) -> str:
    """Write how long ago a time was, in one unit: 12 s ago, 2 min ago, 3 h ago, 4 d ago."""
    passed = max(0, int(time.time() - when))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= length:
            return f"{passed // length} {unit} ago"
    return f"{passed} s ago"


def iso(when: float | None) -> str | None:
    """Write a time for programs, as ISO 8601 in UTC to the millisecond; None if there is none."""
    return datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="milliseconds") if when else None


def path(target: Path) -> str:
    """Write a path the shorter way: relative to the current folder where it lies inside."""
    try:
        return str(target.relative_to(Path.cwd()))
    except ValueError:
        return str(target)


def dim(text: str) -> str:
    """Make text recede on a terminal."""
    return f"{_DIM}{text}{_PLAIN}" if has_colour(sys.stdout) else text


def state(word: State) -> str:
    """Write a state, in its colour."""
    return f"{_STATES.get(word, _RED)}{word.value}{_PLAIN}" if has_colour(sys.stdout) else word.value


def graded(grade: str, stream: IO[Any]) -> str:
    """Write a grade, in its colour."""
    return f"{_GRADES[grade]}{grade}{_PLAIN}" if has_colour(stream) else grade


def flush() -> None:
    """Flush stdout; when nobody reads it any more, keep the interpreter from complaining at its end."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
