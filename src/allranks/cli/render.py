"""Output of the command line: results on stdout, messages on stderr, colour on terminals only."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from allranks.errors import AllranksError
from allranks.job.problems import printable
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

#: What a verdict says of another attempt: a retry ...
RETRY = {
    "never": "will not help: change the script or its environment first",
    "after a change": "can help after a change of the job",
    "as it is": "can help, with nothing changed",
    "on other nodes": "can help on other nodes",
}

#: What a terminal obeys: colour (SGR, group 1), which stays; other control sequences, such as cursor moves (ECMA-48);
#: and single control characters, also those of C1, as text or as bytes that are no text. Tabs, carriage returns and
#: line breaks are none of them.
_OBEYED = re.compile(r"(\x1b\[[0-9;:]*m)|(\x1b\[[0-?]*[ -/]*[@-~])|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\udc80-\udc9f]")


def is_lively(stream: IO[Any]) -> bool:
    """Return whether ``stream`` is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def has_colour(stream: IO[Any]) -> bool:
    """Return whether to use colour on ``stream`` (no-color.org)."""
    return is_lively(stream) and not os.environ.get("NO_COLOR")


def talk(text: str) -> None:
    """Write a message to stderr; a terminal that is gone is no reason to fail. Signal handlers may call it."""
    # What is drawn below the log, or the ^C that the terminal showed.
    wipe = BELOW.wiped() or (b"\r\x1b[K" if is_lively(sys.stderr) else b"")
    with contextlib.suppress(OSError):
        os.write(2, wipe + f"{harmless(text)}\n".encode(errors="replace"))


class Below:
    """The lines that are drawn below the log on a terminal, which are wiped before anything else is written there.

    Each change is one write, from the top down, so that nothing flickers. The cursor stays behind a single line, such
    as a prompt, or in an empty row above the lines. There the terminal shows what a person types, and Enter, which
    moves the cursor to the first line, leaves an empty row.

    Attributes:
        lines: these lines, which may have colours, and which the terminal was wide enough for.
    """

    def __init__(self) -> None:
        self.lines: Sequence[str] = ()
        self._is_above = False

    @property
    def size(self) -> os.terminal_size:
        """The size of the terminal, as it is; :func:`terminal_size` has it as COLUMNS and LINES say."""
        with contextlib.suppress(OSError):
            if all(size := os.get_terminal_size(2)):
                return size
        return terminal_size()

    def wiped(self) -> bytes:
        """Return what wipes the lines, and count them as wiped: the caller writes it at once."""
        if not self.lines:
            return b""
        start, self.lines = self._start(), ()
        return start + (b"\x1b[J" if b"A" in start or self._is_above else b"\x1b[K")

    def drawn(self, lines: Sequence[str], *, above: bool | None = None) -> bytes:
        """Return what draws lines in place of these, and count them as drawn: the caller writes it at once.

        ``above`` is whether the cursor stays above them; None: where it is.
        """
        if not lines:
            return self.wiped()
        start, self.lines = self._start(), lines
        self._is_above = self._is_above if above is None else above
        if self._is_above:
            rows = "".join(f"\n{line}\x1b[K" for line in lines)
            return start + f"\x1b[K{rows}\x1b[J\x1b[{len(lines)}A\r".encode(errors="replace")
        text = "\x1b[K\n".join(lines) + "\x1b[J"
        return start + (text if start else text.removesuffix("\x1b[J")).encode(errors="replace")

    def _start(self) -> bytes:
        """Return what moves the cursor to where the lines start. They are wrapped if the terminal has become narrow."""
        if not self.lines:
            return b""
        columns = self.size.columns
        rows = sum(max(1, -(-cells(_OBEYED.sub("", line)) // columns)) for line in self.lines)
        up = f"\x1b[{rows - 1}A".encode() if rows > 1 and not self._is_above else b""
        # A terminal that becomes wide again joins rows that it wrapped, unless they have been cleared.
        return b"\r" + up + b"\x1b[J" * (rows > len(self.lines))


#: There is one terminal.
BELOW = Below()


def cells(text: str) -> int:
    """Return how many cells of a terminal a text takes: a wide character two, a combining one none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # Commands start sooner without it.

    return cell_len(text)


def harmless(text: str) -> str:
    """Return a text without cursor moves, and with control characters escaped; colours stay.

    Text from nodes and logs may hold any.
    """
    return _OBEYED.sub(lambda found: found[1] or ("" if found[2] else f"\\x{ord(found[0]) & 0xFF:02x}"), text)


def one_line(text: str) -> str:
    """Return a text from elsewhere, such as a host's name for itself, harmless and as one line."""
    return harmless(text).replace("\n", r"\n").replace("\r", r"\r")


def data(text: str, *, cut: bool = False) -> None:
    """Write a result to stdout: unchanged to a file or a pipe, which may be a script, and harmless to a terminal.

    With ``cut`` a terminal shows as much of each line as fits. AllranksError: it cannot be written.
    """
    if sys.stdout.isatty():
        text = harmless("\n".join(map(_cut, text.splitlines())) if cut else text)
    _print(text)


def _print(text: str, end: str = "\n") -> None:
    try:
        print(text, end=end, flush=True)
    except UnicodeEncodeError:  # A file name that is no text, or a terminal that knows few letters.
        text = text.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding)
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as failure:
        raise unwritable_stdout(failure) from failure


def unwritable_stdout(failure: OSError) -> AllranksError:
    """Return the error for a stdout that takes no more, such as a file on a full disk."""
    fix = "write to a file elsewhere, or free space where this one is"
    return AllranksError("cannot write to stdout", why=failure.strerror, fix=fix)


def frames(texts: Iterable[str]) -> None:
    """Show texts on a terminal, each in place of the one before, cut to its size; the last one stays."""
    below = Below()
    try:
        for text in texts:
            lines = harmless(text).splitlines()[: terminal_size().lines - 1]
            _print(below.drawn([_cut(line, 1) for line in lines]).decode(), end="")
    finally:
        _print("")


def terminal_size() -> os.terminal_size:
    """Return the size of the terminal, as shutil does."""
    from shutil import get_terminal_size  # It imports all that compresses files: commands start sooner without it.

    return get_terminal_size()


def _cut(line: str, spare: int = 0) -> str:
    """Cut a line at its end, where there are no colours, to the terminal's width, less the columns to ``spare``."""
    excess = _width(line) - terminal_size().columns + spare
    return line if excess <= 0 else f"{line[: -excess - 1]}…{_PLAIN if _PLAIN in line else ''}"


def wrapped(label: str, text: str) -> str:
    """Return a text after its label; a terminal shows it in lines of its width, below each other."""
    if fits(label + text):
        return label + text
    import textwrap  # Commands start sooner without it.

    lines = textwrap.wrap(
        text,
        max(20, terminal_size().columns - len(label)),
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return label + ("\n" + " " * len(label)).join(lines)


def fits(text: str) -> bool:
    """Return whether each line fits on stdout, which is wide enough if it is no terminal."""
    return not sys.stdout.isatty() or max(map(_width, text.splitlines())) <= terminal_size().columns


def _width(text: str) -> int:
    return len(_OBEYED.sub("", text))  # Colours take no columns.


def as_json(value: Any) -> None:
    """Write a result to stdout as JSON."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2)
    # JSON itself escapes the control characters below these.
    data(re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text))


def error(failure: AllranksError) -> None:
    """Show an error on stderr: what, why, fix, see; several of a job file, one after the other."""
    lines = map(printable, f"error: {failure}".split("\n"))
    label = f"{_BOLD}{_RED}error:{_PLAIN} " if has_colour(sys.stderr) else "error: "
    talk("\n".join(label + line.removeprefix("error: ") if line.startswith("error: ") else line for line in lines))


def unexpected(failure: Exception) -> AllranksError:
    """Save the traceback of an unexpected failure, and return an error that names the file."""
    import tempfile
    import traceback

    try:
        os.getcwd()  # noqa: PTH109 - only to know
    except FileNotFoundError:
        what = "the current directory does not exist any more"
        return AllranksError(what, why="it was removed after this shell went there", fix="cd to another directory")
    text = "".join(traceback.format_exception(failure))
    what = f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__
    why = "this is a bug in allranks"
    try:
        descriptor, name = tempfile.mkstemp(".log", "allranks-")
        with open(descriptor, "w", errors="backslashreplace") as stream:
            stream.write(text)
    except OSError as full:
        return AllranksError(what, why=f"{why}; its traceback cannot be saved: {full.strerror}", see=text.rstrip())
    return AllranksError(what, why=why, fix="please report it with that file", see=name)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align rows under a header, if it is not empty."""
    lines = [[one_line(cell) for cell in row] for row in rows]
    if header:
        lines.insert(0, [*header])
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def ranks(plan: Plan) -> str:
    """Write how many ranks there will be: 4 ranks, 2 to 8 ranks, as many ranks as the nodes have GPUs."""
    if plan.ranks_unknown:
        return "as many ranks as the nodes have GPUs"
    least = plan.min_nodes * plan.nproc_per_node or plan.world_size
    return ("" if least == plan.world_size else f"{least} to ") + format_count(plan.world_size, "rank")


def nodes(plan: Plan) -> str:
    """Write how many nodes there will be: 2 nodes, 1 to 4 nodes, 2 nodes and 1 spare."""
    least = "" if plan.min_nodes in (0, plan.nnodes) else f"{plan.min_nodes} to "
    spares = f" and {format_count(plan.spares, 'spare')}" if plan.spares else ""
    return least + format_count(plan.nnodes, "node") + spares


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
    """Write a path the shorter way: relative to the current directory where it lies inside."""
    try:
        return str(target.relative_to(Path.cwd()))
    except ValueError:
        return str(target)


def _coloured(colour: str, text: str) -> str:
    return f"{colour}{text}{_PLAIN}" if has_colour(sys.stdout) else text


def dim(text: str) -> str:
    """Return a text, dimmed where stdout has colour."""
    return _coloured(_DIM, text)


def state(word: State) -> str:
    """Return a state, coloured where stdout has colour."""
    return _coloured(_STATES.get(word, _RED), word.value)


def graded(grade: str) -> str:
    """Return a grade, coloured where stdout has colour."""
    return _coloured(_GRADES[grade], grade)


def flush() -> None:
    """Flush stdout; if its reader is gone, keep the interpreter from reporting that at exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
