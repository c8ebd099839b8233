"""What the arguments of a script name: files of configuration, and folders that it writes to."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

_FILE = re.compile(r"\.(ya?ml|json|toml)$", re.IGNORECASE)
_NO_PATH = re.compile(r"://|[,;*?$%{}\[\]]|^~")
_CONFIG = re.compile(r"-+([a-z]+[-_.])*(config|conf|cfg|settings)([-_.]?(file|path|json|yaml))?", re.IGNORECASE)
#: What such a name says of a file that the script is to write.
_WRITTEN = re.compile(r"save|out|write|dump|export", re.IGNORECASE)
_FOLDER = re.compile(r"-+(\w+[-_])*(checkpoints?|ckpts?|output|save)[-_]?(dir|folder|path|root)?", re.IGNORECASE)

#: As many folders are looked into for a file, those near the first one first.
_MOST_FOLDERS = 300


def pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the values among arguments, each with the option before it, if there is one."""
    option = ""
    for word in args:
        name, equals, value = word.partition("=")
        if word.startswith("-") and equals:
            yield name, value
            option = ""
        elif word.startswith("-"):
            option = word
        else:
            yield option, word
            option = ""


def named_files(args: Sequence[str], workdir: Path) -> list[tuple[str, Path]]:
    """Return the files of YAML, JSON or TOML that arguments name, each with its option.

    What only the script can make a path of is none: an address, a list, a pattern, a variable, a home.
    """
    named = ((option, value) for option, value in pairs(args) if _FILE.search(value) and not _NO_PATH.search(value))
    found = [(option or "argument", workdir / value) for option, value in named]
    return [(option, path) for option, path in found if not _WRITTEN.search(option)]


def named_so(name: str, folder: Path) -> Path | None:
    """Return a file of that name below a folder: a script may look for its configuration there."""
    waiting, left = deque([folder]), _MOST_FOLDERS
    while waiting and left:
        left -= 1
        inside = waiting.popleft()
        if (inside / name).is_file():
            return inside / name
        with contextlib.suppress(OSError), os.scandir(inside) as entries:
            waiting += sorted(Path(entry.path) for entry in entries if entry.is_dir() and entry.name[0] != ".")
    return None


def is_config(option: str) -> bool:
    """Tell whether an option is called as those that name a configuration are."""
    return bool(_CONFIG.fullmatch(option))


def named_folders(args: Sequence[str], workdir: Path) -> dict[str, str]:
    """Return the folders that a script is told to write to, by the option that says so."""
    found = [(option, value) for option, value in pairs(args) if _FOLDER.fullmatch(option)]
    return {option: str(workdir / value) for option, value in found if not _FILE.search(value)}
