"""Values of YAML files, and how they are written.

Texts that are not plainly words are written as JSON strings, which are YAML too: nothing that a value holds can change
its meaning, nor in readers of YAML 1.1, which take ``48:00:00`` for a number and ``no`` for false.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

INIT: Final = "allranks init writes one to start from"
#: Texts that are written as they are: words, but none that another reader takes for something else.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@+%=-]*", re.ASCII)
_NO_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"}


class Number(str):
    """A number as it is written: ``3.10`` is a version in one place and 3.1 in another."""

    __slots__ = ()


class YamlMapping(dict[str, Any]):
    """A mapping of a YAML file; ``lines`` has the line of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}

    def put(self, key: str, value: Any, line: int) -> None:
        """Set a key that stands in that line."""
        self[key] = value
        self.lines[key] = line


def kind_of(value: object) -> str:
    """Return what a value is in plain words: ``a list``, ``text``."""
    kinds = ((bool, "true or false"), (Number, "a number"), (str, "text"), (list, "a list"), (dict, "a mapping"))
    return next((word for kind, word in kinds if isinstance(value, kind)), "nothing")


def dump_yaml(data: dict[str, Any]) -> str:
    """Return ``data`` (dicts, lists, texts, numbers, booleans, None) as the text of a YAML file."""
    return "".join(f"{line}\n" for line in _lines(data))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            if isinstance(item, dict | list | tuple) and item:
                yield f"{_written(str(key))}:"
                yield from (f"  {line}" for line in _lines(item))
            else:
                yield f"{_written(str(key))}: {_written(item)}"
    elif isinstance(value, list | tuple) and value:
        for item in value:
            first, *others = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in others)
    else:
        yield _written(value)


def _written(value: Any) -> str:
    """Write a scalar, or an empty list or dict."""
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _NO_TEXT:
        return value
    text = ""
    for char in json.dumps(value, ensure_ascii=False):  # Lone surrogates from file names are not printable either.
        wide = f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}"
        text += char if char.isprintable() else wide
    return text
