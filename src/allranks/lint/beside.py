"""The files that a script sources or runs, where they lie below its own directory. Nothing else is read."""

from __future__ import annotations

import re
from pathlib import Path

from allranks.errors import UsageError
from allranks.lint.files import LARGEST, read
from allranks.lint.model import Word

#: Variables that name the directory of the script, or that where it was submitted.
_HERE = re.compile(r"(?:PWD|SLURM_SUBMIT_DIR|PBS_O_WORKDIR|SGE_O_WORKDIR)$|(?:BASH_SOURCE|0)\b")
#: Commands that print it.
_PRINTED = re.compile(r"[$`(\s]*(?:cd\b.*)?\b(?:dirname|pwd)\b")


def file_beside(script: str, word: Word) -> tuple[str, bytes] | None:
    """Return path and content of a file below a script's directory; None if it is not there, or not a shell script."""
    first, *rest = word.parts or (None,)
    if first is None:
        return None
    named = {"variable": _HERE, "command": _PRINTED}.get(first.kind)
    starts_here = first.value is None and named is not None and bool(named.match(first.text))
    values = [part.value for part in (rest if starts_here else word.parts)]
    name = "".join(value for value in values if value is not None)
    if None in values or not name.isprintable() or not Path(script).is_file():
        return None
    if starts_here and not name.startswith("/"):
        return None
    folder = Path(script).parent
    for start in (folder, Path()):
        path = start / (name.lstrip("/") if starts_here else name)
        try:
            is_below = path.is_file() and path.resolve().is_relative_to(folder.resolve())
            data = read(path) if is_below else b""
        except (OSError, RuntimeError, ValueError, UsageError):
            continue
        if data and len(data) <= LARGEST and b"\0" not in data:
            return str(path), data
    return None
