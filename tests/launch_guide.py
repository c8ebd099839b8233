"""The ways to start a training that ``docs/launch-guide.md`` shows, for tests that type them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "launch-guide.md"
_NOW = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STARTS = re.compile(r"(\d+) nodes?, (\d+) ranks?( on each)?\b")


class Way(NamedTuple):
    """What stands below one heading.

    Attributes:
        lines: what is typed now.
        counts: the ranks on each node that the text promises; empty if it promises none.
    """

    lines: list[str]
    counts: list[int]

    @property
    def words(self) -> list[str]:
        """The arguments of its only line."""
        (line,) = self.lines
        return arguments(line)


def ways(place: str) -> dict[str, Way]:
    """Return the ways of a part of the page, by their headings."""
    (part,) = (part for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE) if part.startswith(place))
    found = {}
    for section in re.split(r"^### ", part, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        lines = [line for block in _NOW.findall(text) for line in block.splitlines()]
        promised = _STARTS.search(text)
        found[heading] = Way(lines, [int(promised[2])] * int(promised[1]) if promised else [])
    return found


def arguments(line: str) -> list[str]:
    """Return the arguments of a line that calls allranks."""
    name, *words = shlex.split(line, comments=True)
    assert name == "allranks"
    return words


def typed(command: Any, way: Way) -> str:
    """Type the only line of a way, and return what its ranks have written."""
    done = command(*way.words)
    assert done.rc == 0, done.stderr
    return str(done.stdout)
