"""Types of the values in a job file, each with what reads it, what writes it, and its JSON Schema.

A number in a job file comes as it was written (see ``yaml.py``): text fields get ``3.10`` and not 3.1.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from allranks.job.units import format_duration, format_memory, parse_duration, parse_memory, parse_nodes


def as_name(text: str) -> str:
    """Return a text as part of a file's name; empty if it has nothing that can be in one."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:64]


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("it must be text")
    return str(value)


def _number(value: Any) -> Any:
    """Refuse true and false, which are 1 and 0 in Python."""
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


def _split_by(split: Callable[[str], list[str]]) -> BeforeValidator:
    """Take a list of texts, or one text to split."""
    return BeforeValidator(lambda value: split(value) if isinstance(value, str) else value)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        raise ValueError("a quotation mark is not closed; write a list, one entry for each argument") from None


def _hosts(text: str) -> list[str]:
    """Split at commas, but not inside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[\]]*\])", text) if part.strip()]


def at_commas(value: str | Iterable[Any]) -> Iterator[Any]:
    """Yield the words of a text, or of each text of a list, as a flag that may be repeated gives it."""
    for part in [value] if isinstance(value, str) else value:
        yield from part.replace(",", " ").split() if isinstance(part, str) else [part]


def _ranks(value: Any) -> int | str:
    if isinstance(value, str) and value in get_args(_PerNode):
        return value
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("it must be a number, gpu, cpu or auto; write 2, or gpu for a rank per GPU")
    if value < 1:
        raise ValueError("it must be at least 1; write gpu for a rank per GPU, or auto")
    return int(value)


def _hang_timeout(value: Any) -> float:
    """Return seconds; 0 for off, which other readers of YAML take for false."""
    if value is False or value == "off":
        return 0.0
    text, seconds = _text(value).strip(), 0.0
    if _SECONDS.fullmatch(text):
        seconds = float(text)
    elif text[-1:].isalpha():  # 1:30 would be minutes elsewhere.
        with suppress(ValueError):
            seconds = float(parse_duration(text))
    if not 0 < seconds <= _LONGEST_HANG:
        raise ValueError(
            "it must be a number of seconds above 0, a duration such as 10min, or off; write 10min, or off"
        )
    return seconds


def _webhook(value: Any) -> str:
    """Return a URL. It is a secret, which no message quotes."""
    url = value.strip() if isinstance(value, str) else ""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_valid = False
    if not is_valid or not url.isascii() or any(char.isspace() or not char.isprintable() for char in url):
        raise ValueError("it must be a URL that starts with https:// or http://; copy it from the page of the service")
    return url


_SECONDS = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_LONGEST_HANG = 30 * 86400
_WHOLE = re.compile(r"[+-]?\d{1,9}", re.ASCII)
_TEXT = {"type": ["string", "number"]}
_PerNode = Literal["auto", "gpu", "cpu"]

Text = Annotated[str, BeforeValidator(_text), WithJsonSchema(_TEXT)]
Name = Annotated[str, BeforeValidator(_text), Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Count = Annotated[int, Field(ge=0), BeforeValidator(_number)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_number)]
Port = Annotated[int, Field(ge=1, le=65535), BeforeValidator(_number)]
Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False), BeforeValidator(_number)]
Duration = Annotated[
    int,
    BeforeValidator(lambda value: parse_duration(_text(value))),
    PlainSerializer(format_duration),
    WithJsonSchema(_TEXT),
]
HangTimeout = Annotated[
    float,
    BeforeValidator(_hang_timeout),
    PlainSerializer(lambda seconds: seconds or "off", return_type=float | str),
    WithJsonSchema({"type": ["number", "string", "boolean"]}),
]
Memory = Annotated[
    int,
    BeforeValidator(lambda value: parse_memory(_text(value))),
    PlainSerializer(format_memory),
    WithJsonSchema(_TEXT),
]
Nodes = Annotated[
    tuple[int, int],
    BeforeValidator(lambda value: value if isinstance(value, tuple) else parse_nodes(_text(value))),
    PlainSerializer(lambda nodes: str(nodes[1]) if nodes[0] == nodes[1] else f"{nodes[0]}:{nodes[1]}"),
    WithJsonSchema({"type": ["string", "integer"], "pattern": r"^\s*\d+(:\d+)?\s*$", "minimum": 1}),
]
Ranks = Annotated[
    int | _PerNode,
    BeforeValidator(_ranks),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"enum": [*get_args(_PerNode)]}]}),
]


def _list_or_text(text: str, items: dict[str, Any] = _TEXT) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "array", "items": items}, {**_TEXT, "description": text}]})


Words = Annotated[tuple[str, ...], _split_by(_words), _list_or_text("split as a shell splits it")]
#: A line is for a shell.
Command = Annotated[
    tuple[str, ...],
    _split_by(lambda line: ["/bin/sh", "-c", line] if line.strip() else []),
    _list_or_text("that sh runs"),
]
Webhook = Annotated[str, BeforeValidator(_webhook)]
Lines = Annotated[
    tuple[str, ...],
    _split_by(lambda text: [line for line in text.splitlines() if line.strip()]),
    _list_or_text("one entry a line"),
]
Hosts = Annotated[tuple[str, ...], _split_by(_hosts), _list_or_text("separated by commas")]
_SPLIT_BY_COMMAS = BeforeValidator(
    lambda value: [*at_commas(value)] if isinstance(value, str | list | tuple) else value
)
_BY_COMMAS = "separated by commas or spaces"
Names = Annotated[tuple[str, ...], _SPLIT_BY_COMMAS, _list_or_text(_BY_COMMAS)]
_Event = Literal["start", "failure", "requeue", "end"]
Events = Annotated[tuple[_Event, ...], _SPLIT_BY_COMMAS, _list_or_text(_BY_COMMAS, {"enum": [*get_args(_Event)]})]
_End = Literal["node", "preemption", "hardware"]
Ends = Annotated[tuple[_End, ...], _SPLIT_BY_COMMAS, _list_or_text(_BY_COMMAS, {"enum": [*get_args(_End)]})]
Variables = Annotated[
    dict[str, str],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "additionalProperties": {"type": ["string", "number", "null"]},
        }
    ),
]
