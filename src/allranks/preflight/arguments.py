"""What the arguments of a script name: files of configuration, and folders that it writes to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_FILE = re.compile(r"\.(ya?ml|json|toml)$", re.IGNORECASE)
_CONFIG = re.compile(r"-+([a-z]+[-_.])*(config|conf|cfg|settings)([-_.]?(file|path|json|yaml))?", re.IGNORECASE)
#: What such a name says of a file that the script is to write.
_WRITTEN = re.compile(r"save|out|write|dump|export", re.IGNORECASE)
_FOLDER = re.compile(r"-+(\w+[-_])*(checkpoints?|ckpts?|output|save)[-_]?(dir|folder|path|root)?", re.IGNORECASE)


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
    """Return the files of YAML, JSON or TOML that arguments name, each with its option."""
    found = [(option or "argument", workdir / value) for option, value in pairs(args) if _FILE.search(value)]
    return [(option, path) for option, path in found if not _WRITTEN.search(option)]


def is_config(option: str) -> bool:
    """Tell whether an option is called as those that name a configuration are."""
    return bool(_CONFIG.fullmatch(option))


def named_folders(args: Sequence[str], workdir: Path) -> dict[str, str]:
    """Return the folders that a script is told to write to, by the option that says so."""
    found = [(option, value) for option, value in pairs(args) if _FOLDER.fullmatch(option)]
    return {option: str(workdir / value) for option, value in found if not _FILE.search(value)}
