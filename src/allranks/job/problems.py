"""Problems with what the user asked for: collected, and reported all at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from allranks.errors import JobError

_MOST_SHOWN = 10
_LONGEST_VALUE = 60
#: Letters: too many words start with fewer.
_SHORTEST_START = 3
_LIKENESS = 0.7


class Problem(NamedTuple):
    """One thing that is wrong.

    Attributes:
        where: ``job.yaml:7``, ``--nproc-per-node``, ``NPROC_PER_NODE``; empty when nowhere.
        what: what is wrong, in one line.
        why: the reason or the rule.
        fix: what the user can do.
    """

    where: str
    what: str
    why: str | None = None
    fix: str | None = None


def error_of(*problems: Problem) -> JobError:
    """Return one error for all problems: a single one as it is, else each as an error with its own why and fix."""
    distinct = sorted(dict.fromkeys(problems), key=_place)
    errors = [
        JobError(f"{each.where}: {each.what}" if each.where else each.what, why=each.why, fix=each.fix)
        for each in distinct[:_MOST_SHOWN]
    ]
    if len(errors) == 1:
        return errors[0]
    more = f"\nand {len(distinct) - _MOST_SHOWN} more" if len(distinct) > _MOST_SHOWN else ""
    return JobError("\nerror: ".join(map(str, errors)) + more)


def _place(problem: Problem) -> tuple[bool, str, int]:
    """Order problems as one reads files, with those of the command line after them."""
    file, _, line = problem.where.rpartition(":")
    return (not file, file, int(line)) if line.isdigit() else (True, "", 0)


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """Return ``did you mean 'nodes'?`` for the choice that is most like ``word``, if one is."""
    close = closest(word, choices)
    return f"did you mean {quoted(close)}?" if close else None


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that starts with ``word``, has its letters in another order, or is most like it.

    Cases and hyphens do not count.
    """
    from difflib import get_close_matches  # Not at the top: only mistakes need it.

    normal = {choice.lower().replace("-", "_"): choice for choice in choices}
    key = word.lower().replace("-", "_")
    is_long = len(key.strip("_")) >= _SHORTEST_START
    found = [key] if key in normal else [name for name in normal if is_long and name.startswith(key)]
    # Of few letters, two that are swapped make a word that is not alike enough: lba for lab.
    found = found or [name for name in normal if is_long and sorted(name) == sorted(key)]
    found = found or get_close_matches(key, normal, n=1, cutoff=_LIKENESS)
    return normal[found[0]] if found else None


def quoted(text: str) -> str:
    """Return ``text`` in quotes, on one line and not too long."""
    shown = text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
    return f"'{printable(shown)}'"


def printable(text: str) -> str:
    """Return ``text`` with line ends and control characters written out, so that it stays on one line."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shown_path(path: Path, cwd: Path) -> str:
    """Return a path as messages name it: relative to ``cwd`` where it is inside."""
    for base in (cwd, cwd.resolve()):
        if path.is_relative_to(base):
            return printable(str(path.relative_to(base)))
    return printable(str(path))


def listed(words: Iterable[str], last: str = "or") -> str:
    """Return ``a, b or c``."""
    *head, tail = words
    return f"{', '.join(head)} {last} {tail}" if head else tail
