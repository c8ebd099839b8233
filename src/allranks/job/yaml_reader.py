"""Reads YAML 1.2 into plain values that remember their line.

ruamel.yaml gives the graph of nodes; it is turned into values here, without constructors: no tag can make anything but
text, booleans, lists and mappings, and numbers stay as they are written. Only what reads a file imports this module.
"""

from __future__ import annotations

import re
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scanner import Scanner, ScannerError

from allranks.errors import JobError
from allranks.job.problems import Problem, error_of, printable, quoted
from allranks.job.yaml import INIT, Number, YamlMapping, kind_of

#: Aliases can make a small file large (each line doubling the one before); no job has as many values.
MOST_VALUES: Final = 20_000
#: Lists and mappings in each other; a job file has four. What the parser takes grows with the square of it.
MOST_DEPTH: Final = 64

_PREFIX: Final = "tag:yaml.org,2002:"
_PLAIN_TAGS: Final = {_PREFIX + kind for kind in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp")}
_MERGE: Final = _PREFIX + "merge"


def parse_yaml(text: str, shown: str) -> YamlMapping | None:
    """Return the mapping that a YAML text is; None if it says nothing. ``shown`` is the file as messages name it.

    Raises:
        JobError: it is not YAML, no mapping, or holds what a job file cannot say. The line is named.
    """
    parser = YAML(typ="safe", pure=True)
    parser.Scanner = _Scanner
    problem = Problem(shown, "this is not YAML", why="it is not well formed", fix=_SEE)
    try:
        node = parser.compose(text)
    except ReaderError as error:
        problem = _unreadable(error, text, shown)
    except MarkedYAMLError as error:
        problem = _malformed(error, text, shown)
    except (YAMLError, ValueError):
        pass
    else:
        value = None if node is None else _Builder(shown).value(node, ())
        if value is None or isinstance(value, YamlMapping):
            return value
        what = f"the file must hold keys and values, not {kind_of(value)}"
        fix = f"write lines such as 'name: value'; {INIT}"
        if isinstance(value, str) and (key := re.match(r"(\w+):\S", value)):
            fix = f"write a space after '{key[1]}:'"
        problem = Problem(f"{shown}:{node.start_mark.line + 1}", what, fix=fix)
    raise error_of(problem)  # Not in an except clause: the traceback would carry the text.


class _Scanner(Scanner):
    """Refuses deep nesting where it starts, since the scanner reads far ahead of the parser."""

    def fetch_more_tokens(self) -> Any:
        if len(self.flow_context) + len(self.indents) > MOST_DEPTH:
            raise ScannerError(None, None, "nested too deeply", self.reader.get_mark())
        return super().fetch_more_tokens()


_SEE = "compare with the job file that allranks init writes"

# What ruamel.yaml says, and what it means to a reader who does not know the YAML specification.
_PLAIN_WORDS: tuple[tuple[str, str, str], ...] = (
    (
        r"mapping values are not allowed",
        "a key is not allowed here",
        "indent it as its neighbours are, or quote text that holds ': '",
    ),
    (r"undefined alias '(.*)'", r"the alias *\1 has no anchor &\1 above it", _SEE),
    (r"another document", "a second document starts here", "keep one document in the file; remove '---'"),
    (r"unexpected end of stream", "the quotation mark that opens here is not closed", "close it in this line"),
    (r"'<stream end>'", "the bracket that opens here is not closed", "close it"),
    (r"cannot start any token", "{char} cannot stand at the start of a value", "put the value in quotes"),
    (r"unknown escape character '(.)'", r"\\\1 means nothing in double quotes", "use single quotes"),
    (r"found '(\]|\}|,)'", r"\1 stands where nothing opened it", _SEE),
    (
        r"'<block mapping start>'|expected <block end>",
        "this line fits neither the line above nor the indentation",
        _SEE,
    ),
    (r"nested too deeply", f"lists and mappings are nested in each other more than {MOST_DEPTH} times", _SEE),
    (r"undefined tag handle", "tags are not used in job files", "remove the part that starts with !"),
)


def _malformed(error: MarkedYAMLError, text: str, shown: str) -> Problem:
    mark, said = error.problem_mark or error.context_mark, error.problem or ""
    if re.search(r"unexpected end of stream|'<stream end>'", said):
        mark = error.context_mark or mark  # Where what is not closed was opened.
    if mark is None:
        return Problem(shown, "this is not YAML", fix=_SEE)
    where, what = f"{shown}:{mark.line + 1}", f"this is not YAML, at column {mark.column + 1}"
    line = "".join(text.splitlines()[mark.line : mark.line + 1])
    if "\\t" in said or "\t" in line[: len(line) - len(line.lstrip())]:
        return Problem(
            where,
            "a tab is not allowed here",
            why="YAML is indented with spaces",
            fix="write spaces instead of the tab",
        )
    for pattern, words, fix in _PLAIN_WORDS:
        if found := re.search(pattern, said):
            why = found.expand(words).replace("{char}", quoted(line[mark.column : mark.column + 1]))
            return Problem(where, what, why=why, fix=fix)
    return Problem(where, what, why="it is not well formed", fix=_SEE)


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

    def value(self, node: Node, above: tuple[int, ...]) -> Any:
        """Return the value of a node; ``above`` are the ids of the nodes that contain it."""
        self._count += 1
        if self._count > MOST_VALUES:
            raise self._error(node, "the file is too large", f"with its aliases it has over {MOST_VALUES} values")
        if id(node) in above:
            raise self._error(node, "an alias contains itself", "it would never end")
        if str(node.tag) not in _PLAIN_TAGS:
            tag = str(node.tag).replace(_PREFIX, "!!")
            raise self._error(node, f"the tag {quoted(tag)} is not allowed", "job files hold plain values only")
        if isinstance(node, MappingNode):
            return self._mapping(node, (*above, id(node)))
        if isinstance(node, SequenceNode):
            return [self.value(item, (*above, id(node))) for item in node.value]
        return _scalar(str(node.value), str(node.tag).removeprefix(_PREFIX))

    def _mapping(self, node: MappingNode, above: tuple[int, ...]) -> YamlMapping:
        entries, merged = YamlMapping(), YamlMapping()
        for key_node, value_node in node.value:
            if str(key_node.tag) == _MERGE:
                self._merge(merged, value_node, above)
                continue
            if not isinstance(key_node, ScalarNode):
                raise self._error(key_node, "a key must be text", "lists and mappings cannot be keys")
            key = str(key_node.value)
            if key in entries:
                why = f"it is also in line {entries.lines[key]}"
                raise self._error(key_node, f"the key {quoted(key)} is given twice", why, "remove one of the two")
            entries.put(key, self.value(value_node, above), key_node.start_mark.line + 1)
        for key, value in merged.items():
            if key not in entries:
                entries.put(key, value, merged.lines[key])
        return entries

    def _merge(self, merged: YamlMapping, node: Node, above: tuple[int, ...]) -> None:
        """Add what ``<<: *anchor`` brings; of several, the first one counts."""
        for part in node.value if isinstance(node, SequenceNode) else [node]:
            value = self.value(part, above)
            if not isinstance(value, YamlMapping):
                raise self._error(part, "<< takes a mapping", "only mappings can be merged")
            for key, item in value.items():
                if key not in merged:
                    merged.put(key, item, value.lines[key])

    def _error(self, node: Node, what: str, why: str, fix: str = _SEE) -> JobError:
        return error_of(Problem(f"{self._shown}:{node.start_mark.line + 1}", what, why=why, fix=fix))


def _scalar(text: str, kind: str) -> Any:
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return Number(text) if kind in ("int", "float") else text
