"""What a rule is, what it matches, and what the verdict on a failure holds."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, partial
from typing import Any


class Level(IntEnum):
    """How near to the root a failure is: the lowest one that is found explains the others."""

    OUTSIDE = 0  # Somebody or something else ended the job: a scheduler, the kernel, a broken GPU or node.
    CAUSE = 1  # A message that means one thing.
    GENERAL = 2  # An exception, a signal, a library's error: what is behind it is for the user to see.
    UNCLEAR = 3  # A message that often stands where the cause is not in the logs.
    FOLLOWS = 4  # What other ranks say of a rank that has ended.
    LAUNCHER = 5  # What a launcher says of it.


@dataclass(frozen=True)
class Rule:
    """One class of failure."""

    id: str  # Its name in ``--json`` and in the documentation.
    #: The sentence of the verdict; ``{name}`` stands for what a pattern captured as name, name2, …; what is in brackets
    #: is left out if nothing was captured.
    cause: str
    patterns: tuple[str, ...]  # Regular expressions of Python, each for one line; the named groups are captured.
    fix: str  # What to do: commands to type, lines to change.
    #: Whether a retry can help: ``never`` (the script or the environment is at fault), ``after a change`` of the job's
    #: settings, ``as it is``, or ``on other nodes``.
    retry: str
    level: Level = Level.CAUSE  # How near to the root it is.
    source: str = ""  # Where the knowledge is from.
    certain: bool = True  # Whether the text has this one meaning; otherwise the verdict is ``likely``.
    despite: str = ""  # A pattern of lines that are none of this class, although a pattern matches.
    near: str = ""  # A pattern of which a line before, in the same report, must hold a match too.
    inside: str = ""  # A pattern that the file of the frame above must match, which raised it.
    vague: str = ""  # A pattern of lines that say less than those of other rules of its level.
    explains: tuple[str, ...] = ()  # Rules of lower levels whose matches only follow it.

    @cached_property
    def compiled(self) -> tuple[re.Pattern[str], ...]:
        """The patterns."""
        return tuple(re.compile(pattern) for pattern in self.patterns)

    @cached_property
    def exception(self) -> re.Pattern[str] | None:
        """The pattern of lines that are none of this class."""
        return re.compile(self.despite) if self.despite else None


def _rule(
    retry: str,
    id: str,
    cause: str,
    *patterns: str,
    fix: str,
    level: Level = Level.CAUSE,
    source: str = "",
    certain: bool = True,
    despite: str = "",
    near: str = "",
    inside: str = "",
    vague: str = "",
    explains: tuple[str, ...] = (),
) -> Rule:
    return Rule(id, cause, patterns, fix, retry, level, source, certain, despite, near, inside, vague, explains)


#: Each makes a rule, of a failure after which a retry helps never, as it is, after a change, or on other nodes.
never, as_it_is = partial(_rule, "never"), partial(_rule, "as it is")
after_a_change, on_other_nodes = partial(_rule, "after a change"), partial(_rule, "on other nodes")


@dataclass(frozen=True)
class Line:
    """A line of a log, without what launchers put before it."""

    file: str  # The log's name.
    number: int  # Counted from 1; from the end of a log of which only the end was read, negative.
    text: str  # The line, without terminal codes and prefix.
    rank: int | None = None  # The rank that wrote it, if the file or the line's prefix says so.


@dataclass(frozen=True)
class Match:
    """A line that a rule matches."""

    rule: Rule
    line: Line
    captured: dict[str, str] = field(default_factory=dict)  # What the pattern's named groups matched.
    place: str = ""  # The innermost frame in the user's code, of an exception's line: ``train.py:88``.
    order: int = 0  # The position of the line in its log.
    is_note: bool = False  # Whether it is a warning, which may be harmless.
    is_own: bool = False  # Whether that frame is the innermost of all, so that the user's code raised it.
    is_last: bool = True  # Whether it is the last word of what wrote it.


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a failure."""

    id: str  # The rule; empty if the cause is unknown.
    cause: str  # One sentence.
    sure: str  # ``certain``, ``likely`` or ``unknown``.
    rank: int | None = None  # The rank that failed first, if known.
    host: str | None = None  # The node of that rank, if known.
    when: float | None = None  # When that rank ended, in seconds since 1970, if known.
    evidence: tuple[Line, ...] = ()  # Lines that show it, the most telling first.
    place: str = ""  # Where in the user's code it happened.
    followed: str = ""  # What only followed.
    fix: str = ""  # What to do.
    retry: str = ""  # Whether a retry can help.

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Diagnosis:
        """Read what :func:`dataclasses.asdict` returned.

        Raises:
            TypeError, KeyError: it is of another version.
        """
        return cls(**{**raw, "evidence": tuple(Line(**line) for line in raw["evidence"])})
