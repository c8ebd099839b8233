"""The messages between agents: each kind with its fields and their types."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
_Check = Callable[[Any], bool]

_LARGEST = 1 << 63


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_time(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _is_number(value: Any) -> bool:
    return type(value) is int and abs(value) < _LARGEST


def _is_count(value: Any) -> bool:
    return _is_number(value) and bool(value >= 0)


def _is_signal(value: Any) -> bool:
    return _is_number(value) and value in signal.valid_signals()


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _list_of(check: _Check) -> _Check:
    return lambda value: type(value) is list and all(map(check, value))


def _is_node(value: Any) -> bool:
    """Return whether it is a node of a generation: its number, its host and how many ranks it has."""
    return (
        type(value) is list and len(value) == 3 and _is_count(value[0]) and _is_text(value[1]) and _is_count(value[2])
    )


_OF_ALL: dict[str, _Check] = {"kind": _is_text, "sent": _is_time}
_HELLO = {"attempt": _is_count, "node": _is_count, "host": _is_text, "ranks": _is_count, "torch": _or_none(_is_text)}
_OUTCOME = {
    "state": _is_text,
    "exit_code": _is_count,
    "reason": _or_none(_is_text),
    "rank": _or_none(_is_count),
    "lost": _list_of(_is_text),
}
_KINDS: dict[str, dict[str, _Check]] = {
    # --- sent by the agent of a node ---
    "hello": _HELLO,
    "ready": {},
    "failed": {"rank": _is_count, "code": _is_number, "at": _is_time},
    "over": {"cut": _is_flag, "continue": _is_flag},
    "leaving": {"why": _is_text},
    # --- sent by both ---
    "stop": {"signal": _is_signal, "by": _is_text},
    # --- sent by the coordinator ---
    "welcome": {"host": _is_text},
    "refused": {"why": _is_text},
    "generation": {"number": _is_count, "address": _is_text, "port": _is_count, "nodes": _list_of(_is_node)},
    "end-ranks": {},
    "missing": {"nodes": _list_of(_is_count)},
    "again": {"restart": _is_count, "rank": _or_none(_is_count), "counted": _is_flag},
    "lost": {"node": _is_count, "host": _is_text, "why": _is_text, "goes_on": _is_flag},
    "outcome": _OUTCOME,
}


def parsed(line: bytes) -> Message | None:
    """Return the message of a line; None if it is invalid: a field is missing, unknown or of another type."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not _is_text(message.get("kind")):
        return None
    checks = _KINDS.get(message["kind"])
    if checks is None or message.keys() != _OF_ALL.keys() | checks.keys():
        return None
    return message if all(check(message[name]) for name, check in (_OF_ALL | checks).items()) else None
