"""Types of the job file's values: what may be written, and what it is read as.

A number in a job file comes as it was written (see ``yaml.py``): text fields get ``3.10`` and not 3.1.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from allranks.job.units import (
    format_duration,
    format_memory,
    parse_duration,
    parse_memory,
    parse_nodes,
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    """Take text, or a number standing where text is meant (YAML reads ``time: 90`` as a number)."""
    if isinstance(value, str):
        return value
    if not _is_number(value):
        raise ValueError("it must be text")
    return str(getattr(value, "written", value))


def _number(value: Any) -> Any:
    """Refuse true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


def _duration(value: Any) -> int:
    return parse_duration(_text(value))


def _memory(value: Any) -> int:
    return parse_memory(_text(value))


def _nodes(value: Any) -> tuple[int, int]:
    if isinstance(value, tuple):
        return value
    return parse_nodes(_text(value))


def _write_nodes(nodes: tuple[int, int]) -> str:
    least, most = nodes
    return str(most) if least == most else f"{least}:{most}"


def _texts(value: Any) -> Any:
    """Let numbers stand in a list of texts: ``args: [--epochs, 5]``."""
    if isinstance(value, list | tuple):
        return [_text(item) if _is_number(item) else item for item in value]
    return [_text(value)] if _is_number(value) else value


def _words(value: Any) -> Any:
    """Take a list, or one line that is split the way a shell splits it."""
    if not isinstance(value, str):
        return _texts(value)
    try:
        return shlex.split(value)
    except ValueError:
        raise ValueError("a quotation mark is not closed; write a list, one entry for each argument") from None


def _lines(value: Any) -> Any:
    """Take a list, or a block of text with one entry a line."""
    if not isinstance(value, str):
        return _texts(value)
    return [line for line in value.splitlines() if line.strip()]


def _hosts(value: Any) -> Any:
    """Take a list, or one text with commas between the hosts; commas inside brackets stay."""
    if not isinstance(value, str):
        return _texts(value)
    parts, depth, current = [], 0, ""
    for char in value:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [part.strip() for part in [*parts, current] if part.strip()]


def _names(value: Any) -> Any:
    """Take a list, or one text with commas or spaces between the names."""
    return value.replace(",", " ").split() if isinstance(value, str) else _texts(value)


def _variables(value: Any) -> Any:
    """Let numbers stand where a variable's text is meant: ``NCCL_IB_TIMEOUT: 22``."""
    if isinstance(value, dict):
        return {name: _text(item) if _is_number(item) else item for name, item in value.items()}
    return value


def _ranks(value: Any) -> int | str:
    if isinstance(value, str) and value in ("auto", "gpu", "cpu"):
        return value
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("it must be a number, gpu, cpu or auto")
    if value < 1:
        raise ValueError("it must be at least 1; write gpu for a rank per GPU, or auto")
    return int(value)


_WHOLE = re.compile(r"[+-]?\d{1,9}", re.ASCII)
_TEXT = {"type": ["string", "number"]}
_DEFAULT_LIST = {"type": "array", "items": _TEXT}

Text = Annotated[str, BeforeValidator(_text), WithJsonSchema(_TEXT)]
Name = Annotated[str, BeforeValidator(_text), Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Count = Annotated[int, Field(ge=0), BeforeValidator(_number)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_number)]
Port = Annotated[int, Field(ge=1, le=65535), BeforeValidator(_number)]
Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False), BeforeValidator(_number)]
Duration = Annotated[int, BeforeValidator(_duration), PlainSerializer(format_duration), WithJsonSchema(_TEXT)]
Memory = Annotated[int, BeforeValidator(_memory), PlainSerializer(format_memory), WithJsonSchema(_TEXT)]
Nodes = Annotated[
    tuple[int, int],
    BeforeValidator(_nodes),
    PlainSerializer(_write_nodes),
    WithJsonSchema({"type": ["string", "integer"], "pattern": r"^\s*\d+(:\d+)?\s*$", "minimum": 1}),
]
Ranks = Annotated[
    int | Literal["auto", "gpu", "cpu"],
    BeforeValidator(_ranks),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["auto", "gpu", "cpu"]}]}),
]


def _list_or_text(text: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [_DEFAULT_LIST, {**_TEXT, "description": text}]})


Words = Annotated[tuple[str, ...], BeforeValidator(_words), _list_or_text("split as a shell splits it")]
Lines = Annotated[tuple[str, ...], BeforeValidator(_lines), _list_or_text("one entry a line")]
Hosts = Annotated[tuple[str, ...], BeforeValidator(_hosts), _list_or_text("separated by commas")]
Names = Annotated[tuple[str, ...], BeforeValidator(_names), _list_or_text("separated by commas or spaces")]
Variables = Annotated[
    dict[str, str],
    BeforeValidator(_variables),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "additionalProperties": {"type": ["string", "number", "null"]},
        }
    ),
]
