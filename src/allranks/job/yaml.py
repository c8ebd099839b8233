"""Reads YAML 1.2 into plain values that remember their line.

ruamel.yaml gives the graph of nodes; it is turned into values here, without constructors: no tag can make
anything but text, numbers, booleans, lists and mappings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scanner import Scanner, ScannerError

from allranks.errors import JobError
from allranks.job.problems import Problem, one_of, printable, quoted

#: Aliases can make a small file large (each line doubling the one before); no job has as many values.
MOST_VALUES: Final = 20_000
#: Lists and mappings in each other; a job file has four. What the parser takes grows with the square of it.
MOST_DEPTH: Final = 64

_PREFIX: Final = "tag:yaml.org,2002:"
_PLAIN_TAGS: Final = {_PREFIX + kind for kind in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp")}
_MERGE: Final = _PREFIX + "merge"


class WrittenInt(int):
    """A whole number and how it was written."""

    written: str


class WrittenFloat(float):
    """A number and how it was written: ``3.10`` is a version in one place and 3.1 in another."""

    written: str


@dataclass(frozen=True)
class Value:
    """A value of a YAML file: text, number, boolean, None, list of Value, or dict of Entry by key."""

    data: Any
    line: int

    @property
    def plain(self) -> Any:
        """The value without the lines."""
        if isinstance(self.data, dict):
            return {key: entry.value.plain for key, entry in self.data.items()}
        if isinstance(self.data, list):
            return [item.plain for item in self.data]
        return self.data


@dataclass(frozen=True)
class Entry:
    """A key of a mapping: its line, and the value."""

    line: int
    value: Value


def parse_yaml(text: str, shown: str) -> Value | None:
    """Return what a YAML text says; None if it says nothing.

    Args:
        text: the text of the file.
        shown: the file as messages name it.

    Raises:
        JobError: it is not YAML, or holds what a job file cannot say. The line is named.
    """
    node, problem = _compose(text, shown)
    if problem:
        raise one_of(problem)
    if node is None:
        return None
    return _Builder(shown).value(node, ())


def _compose(text: str, shown: str) -> tuple[Node | None, Problem | None]:
    """Return the graph of nodes, or what is wrong; not raised here, so that no traceback carries the text."""
    parser = YAML(typ="safe", pure=True)
    parser.Scanner = _Scanner
    try:
        return parser.compose(text), None
    except ReaderError as error:
        return None, _unreadable(error, text, shown)
    except MarkedYAMLError as error:
        return None, _malformed(error, text, shown)
    except (YAMLError, ValueError):
        return None, Problem(shown, "this is not YAML", why="it is not well formed", fix=_SEE)


class _Scanner(Scanner):
    """Gives up on what is nested too deeply where that begins, since it reads far ahead of the parser."""

    def fetch_more_tokens(self) -> Any:
        if len(self.flow_context) + len(self.indents) > MOST_DEPTH:
            raise ScannerError(None, None, "nested too deeply", self.reader.get_mark())
        return super().fetch_more_tokens()


_SEE = "compare with the job file that allranks init writes"

# What ruamel.yaml says, and what it means to somebody who has never read the YAML specification.
_PLAIN_WORDS: tuple[tuple[str, str, str | None], ...] = (
    (
        r"mapping values are not allowed",
        "a colon stands where no key can be",
        "indent it as its neighbours are, or quote text that holds ': '",
    ),
    (r"undefined alias '(.*)'", r"the alias *\1 has no anchor &\1 above it", None),
    (r"another document", "a second document starts here", "keep one document in the file; remove '---'"),
    (r"unexpected end of stream", "a quotation mark is not closed", None),
    (r"'<stream end>'", "a bracket is not closed", None),
    (r"cannot start any token", "{char} cannot stand at the start of a value", "put the value in quotes"),
    (r"unknown escape character '(.)'", r"\\\1 means nothing in double quotes", "use single quotes"),
    (r"found '(\]|\}|,)'", r"\1 stands where nothing opened it", None),
    (
        r"'<block mapping start>'|expected <block end>",
        "this line fits neither the line above nor the indentation",
        None,
    ),
    (
        r"nested too deeply",
        f"lists and mappings are nested in each other more than {MOST_DEPTH} times",
        None,
    ),
    (r"undefined tag handle", "tags are not used in job files", "remove the part that starts with !"),
)


def _malformed(error: MarkedYAMLError, text: str, shown: str) -> Problem:
    mark, said = error.problem_mark or error.context_mark, error.problem or ""
    if mark is None:
        return Problem(shown, "this is not YAML", fix=_SEE)
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\\t" in said or "\t" in line[: len(line) - len(line.lstrip())]:
        return _tab(f"{shown}:{mark.line + 1}")
    why, fix = _reason(said, line[mark.column : mark.column + 1])
    what = f"this is not YAML, at column {mark.column + 1}"
    return Problem(f"{shown}:{mark.line + 1}", what, why=why, fix=fix or _SEE)


def _reason(said: str, char: str) -> tuple[str, str | None]:
    for pattern, why, fix in _PLAIN_WORDS:
        if found := re.search(pattern, said):
            return found.expand(why).replace("{char}", quoted(char)), fix
    return "it is not well formed", None


def _tab(where: str) -> Problem:
    return Problem(where, "a tab stands here", why="YAML takes no tabs", fix="write spaces instead of the tab")


def _unreadable(error: ReaderError, text: str, shown: str) -> Problem:
    line = text.count("\n", 0, error.position) + 1
    char = text[error.position : error.position + 1]
    return Problem(
        f"{shown}:{line}",
        f"the character {printable(char)} cannot stand in a YAML file",
        fix=f"write it as an escape in double quotes, or remove it; is {shown} a text file?",
    )


class _Builder:
    """Turns nodes into values, and refuses what a job file cannot say."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._count = 0

    def value(self, node: Node, above: tuple[int, ...]) -> Value:
        line = node.start_mark.line + 1
        self._check(node, above, line)
        if isinstance(node, MappingNode):
            return Value(self._mapping(node, (*above, id(node))), line)
        if isinstance(node, SequenceNode):
            return Value([self.value(item, (*above, id(node))) for item in node.value], line)
        return Value(_scalar(node), line)

    def _check(self, node: Node, above: tuple[int, ...], line: int) -> None:
        self._count += 1
        if self._count > MOST_VALUES:
            raise self._error(line, "the file is too large", f"with its aliases it has over {MOST_VALUES} values")
        if id(node) in above:
            raise self._error(line, "an alias contains itself", "it would never end")
        if str(node.tag) not in _PLAIN_TAGS:
            tag = str(node.tag).replace(_PREFIX, "!!")
            raise self._error(line, f"the tag {quoted(tag)} is not allowed", "job files hold plain values only")

    def _mapping(self, node: MappingNode, above: tuple[int, ...]) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            if str(key_node.tag) == _MERGE:
                self._merge(merged, value_node, above)
                continue
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key in entries:
                what = f"the key {quoted(key)} is given twice"
                raise self._error(line, what, f"it is also in line {entries[key].line}", "remove one of the two")
            entries[key] = Entry(line, self.value(value_node, above))
        return merged | entries

    def _merge(self, merged: dict[str, Entry], node: Node, above: tuple[int, ...]) -> None:
        """Add what ``<<: *anchor`` brings; of several, the first one counts."""
        for part in node.value if isinstance(node, SequenceNode) else [node]:
            value = self.value(part, above)
            if not isinstance(value.data, dict):
                raise self._error(value.line, "<< takes a mapping", "only mappings can be merged")
            for key, entry in value.data.items():
                merged.setdefault(key, entry)

    def _key(self, node: Node) -> str:
        if not isinstance(node, ScalarNode):
            raise self._error(node.start_mark.line + 1, "a key must be text", "lists and mappings are no keys")
        return str(node.value)

    def _error(self, line: int, what: str, why: str, fix: str | None = None) -> JobError:
        return one_of(Problem(f"{self._shown}:{line}", what, why=why, fix=fix or _SEE))


def _scalar(node: Node) -> Any:
    text, kind = str(node.value), str(node.tag).removeprefix(_PREFIX)
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return _number(text, kind) if kind in ("int", "float") else text


def _number(text: str, kind: str) -> Any:
    """Return the number that is written, or the text where it is none of YAML 1.2."""
    digits = text.replace("_", "").lower()
    number: WrittenInt | WrittenFloat
    try:
        if kind == "int":
            number = WrittenInt(digits, 0 if re.match(r"[+-]?0[xob]", digits) else 10)
        else:
            number = WrittenFloat(re.sub(r"^([+-]?)\.(inf|nan)$", r"\1\2", digits))
    except ValueError:
        return text
    number.written = text
    return number
