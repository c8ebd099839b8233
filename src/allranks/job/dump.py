"""Writes plain data as YAML 1.2.

Texts that are not plainly words are written as JSON strings, which are YAML too: nothing that a value holds
can change its meaning, nor in readers of YAML 1.1, which take ``48:00:00`` for a number and ``no`` for false.
"""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@+%=-]*", re.ASCII)
_NO_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"}


def dump_yaml(data: dict[str, Any]) -> str:
    """Return ``data`` (dicts, lists, texts, numbers, booleans, None) as the text of a YAML file."""
    return "".join(f"{line}\n" for line in _mapping(data)) or "{}\n"


def _mapping(data: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in data.items():
        name = _scalar(str(key))
        if isinstance(value, dict | list | tuple) and value:
            lines.append(f"{name}:")
            lines += [f"  {line}" for line in _block(value)]
        else:
            lines.append(f"{name}: {_scalar(value)}")
    return lines


def _block(value: Any) -> list[str]:
    if isinstance(value, dict):
        return _mapping(value)
    lines = []
    for item in value:
        inner = _block(item) if isinstance(item, dict | list | tuple) and item else [_scalar(item)]
        lines += [f"- {inner[0]}", *(f"  {line}" for line in inner[1:])]
    return lines


def _scalar(value: Any) -> str:
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, list | tuple):
        return "[]"
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _NO_TEXT:
        return value
    return "".join(_escaped(char) for char in json.dumps(value, ensure_ascii=False))


def _escaped(char: str) -> str:
    """Escape what a YAML file must not hold as it is, lone surrogates from file names among it."""
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
