"""Lines of any log: what a terminal, a launcher or a collector has put around them is taken off.

A log may be huge, binary, or one endless line: its end is read, and rules are tried on lines with a word of failure.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from allranks.diagnosis.languages import WORDS
from allranks.diagnosis.model import Line

#: Characters of a line that are looked at, from its beginning and from its end.
_LONG = 2000
_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|.)")
#: What launchers and collectors put before a line; the first group is the rank. Several may follow each other.
_PREFIX = re.compile(
    r"\[rank ?:? ?(\d+)\]:? ?|\[(?:default|trainer|worker)_?(\d+)\]: ?|\[\d+,(\d+)\]<std(?:err|out|diag)>: ?"
    r"|\[(?:\d+:)?(\d+)(?:[,\-][\d,\-]*)?\]:? |\s{0,5}(\d{1,5}): (?=\S| {2,})|\[(?:node )?[\w.-]+:\d+\] (?=\*\*\*)"
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:? ?"
    r"|\((?:\w+ )?pid=\d+(?:, ip=[\d.]+)?\) ?"
    r"|(?:(?!\S*(?:Error|Exception|Failed): )[A-Za-z][\w.-]*(?:: |\| )| ?- [\w.]+ - [A-Z]+ - |(?:\| *\w+ *)+\| |E {3,}"
    r"|[EF]\d{4} \d\d:\d\d:[\d.]+ +\d+ [\w./-]+:\d+\] )"
    r"(?=Traceback|\[rank|-?(?:ba|z)?sh: |(?:  )+File \"|(?:\w+\.)*[A-Z]\w+(?:Error|Exception)\b)"
    r"|ERROR \d\d-\d\d \d\d:\d\d:\d\d \[[\w.]+:\d+\] ?|I\d{4} \d\d:\d\d:[\d.]+ +\d+ [\w./-]+:\d+\] (?=\[rank)"
)
#: Frames of C++, of which libraries print hundreds below their messages.
_CPP_FRAME = re.compile(r"(?:\[rank\d+\]:)?\s*frame #\d+: ")
#: Where a line names the rank that wrote it, behind what torch logs before it.
_NAMED = re.compile(r"\[Rank (\d+)\]| Rank (\d+)\] ")
#: Each line that a rule matches has one of these, in small letters; most lines of a log have none.
_TELLING = (
    "error", "fail", "exception", "exceed", "exit", "kill", "cancel", "timed out", "timeout", "time limit",
    "walltime", "due to", "fault", "abort", "terminat", "interrupt", "signal", "sig", "denied", "refused", "reset",
    "closed", "lost", "unable", "invalid", "illegal", "insufficient", "mismatch", "out of", "oom", "xid", "status_",
    "errno", "stale", "quota", "nan", " inf", "expected", "must", "preempt", "space", "already", "duplicate",
    "busy", "missing", "corrupt", "truncat", "broken", "unknown", "unrecognized", " not ", "not_", "n't", "cannot",
    " no ", "limit", "violat", "reject", "async", "read-only", "require", "undefined", "prolog", " held",
    "restricted", "gated", "pickle", "twice", "weights_only", "in-place", "inplace", "requested", " bad_", "what()",
    "warn", "died", "nccl", "parameters", "of rank", "job submit", "module", "found", "different", "inconsistent",
    "overflow", "micro_batch", "across ranks", "went down", "credential", "request of", "evict", "low on",
    "incompatible", "fatal", "exclusive", "qsub:", "term_", "bad termination", "exit string", "disconnect", "as root",
    "installed", "returned -1", "nvrm", "fallen", "nvlink", "delet", "qos", "assoc", "peraccount", "peruser", "timeout",
    "imagepull", "opal", "unsupported", "marked dead", "unavailable", "crashloop", "vendor err",
    "divisible", "assertionerror", "double free", "core dumped", "revoked",
    *WORDS,
)  # fmt: skip


class Log:
    """A log: its lines as they were written, of which those that matter are looked at.

    Attributes:
        name: the file's name.
        texts: the lines.
        rank: the rank that wrote it, if only one did.
    """

    def __init__(self, name: str, texts: Sequence[str], rank: int | None = None, *, is_end: bool = False) -> None:
        self.name, self.texts, self.rank = name, texts, rank
        self._first = -len(texts) if is_end else 1  # Of the end of a file the lines' numbers are not known.

    @cached_property
    def telling(self) -> list[int]:
        """Where the lines are that a rule may match."""
        small = [text.lower() for text in self.texts]
        starts = [0, *accumulate(len(text) + 1 for text in small)]
        whole = "\n".join(small)
        found = set()
        for word in _TELLING:  # Over the whole log at once: a word for a word in each line takes ten times as long.
            at = whole.find(word)
            while at >= 0:
                number = bisect(starts, at) - 1
                found.add(number)
                at = whole.find(word, starts[number + 1])
        return [at for at in sorted(found) if not _CPP_FRAME.match(self.texts[at])]

    def line(self, at: int) -> Line:
        """Return a line without terminal codes and prefixes."""
        return plain(self.texts[at], self.name, self._first + at, self.rank)


def read(path: Path, most: int, rank: int | None = None, since: int = 0) -> Log:
    """Read a log from byte ``since`` on; of more than ``most`` bytes only the end.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        start = max(since, size - most)
        stream.seek(start)
        lines = split(stream.read(most))
    return Log(str(path), lines[1:] if start > since else lines, rank, is_end=bool(start))


def split(data: bytes) -> list[str]:
    """Return the lines of some bytes, of which a progress bar has left the last state."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text = data.decode("utf-16", errors="replace")
    else:
        text = data.decode(errors="replace")
    lines = text.replace("\r\n", "\n").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return [_cut(line.rstrip("\r").rpartition("\r")[2]) for line in lines]


def _cut(line: str) -> str:
    return line if len(line) <= 2 * _LONG else f"{line[:_LONG]} … {line[-_LONG:]}"


def plain(text: str, name: str, number: int, rank: int | None = None) -> Line:
    """Return a line without terminal codes and prefixes; these may name the rank."""
    if "\x1b" in text:
        text = _CODES.sub("", text)
    while found := _PREFIX.match(text):
        if found.end() == 0:
            break
        named = next((group for group in found.groups() if group), None)
        rank = int(named) if named and rank is None else rank
        text = text[found.end() :]
    if rank is None and (inside := _NAMED.search(text)):
        rank = int(inside[1] or inside[2])
    return Line(name, number, text.rstrip(), rank)
