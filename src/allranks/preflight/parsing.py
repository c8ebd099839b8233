"""Whether a file of configuration can be parsed: its form alone, as nobody knows here what it may say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

#: A file of more bytes is data, which would take long to parse.
_LARGEST = 1 << 20


def why_no_config(path: Path) -> str | None:
    """Say why a file cannot be parsed as what its name says it is; None: it can, or nothing here can tell."""
    try:
        if path.stat().st_size <= _LARGEST:
            _PARSERS[path.suffix.lower()](path.read_text(encoding="utf-8"))
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return " ".join(str(error).split())
    except RecursionError:
        return "it is nested too deeply"
    return None


def _yaml(text: str) -> None:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        for _ in YAML(typ="safe", pure=True).parse(text):  # Events alone: a tag may be the script's own.
            pass
    except MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem or error.context}") from error
    except YAMLError as error:  # A character that YAML has no place for.
        raise ValueError(str(error)) from error


def _toml(text: str) -> None:
    if sys.version_info >= (3, 11):
        import tomllib

        tomllib.loads(text)


_PARSERS: dict[str, Callable[[str], object]] = {".yaml": _yaml, ".yml": _yaml, ".json": json.loads, ".toml": _toml}
