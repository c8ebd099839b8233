"""The files that a script sources or runs, where they lie below its own directory. Nothing else is read."""

from __future__ import annotations

import re
from pathlib import Path

from allranks.errors import UsageError
from allranks.lint.files import read, why_not_read
from allranks.lint.model import Part, Word

#: Variables that name the directory of the script, or that where it was submitted.
_HERE = re.compile(r"(?:PWD|SLURM_SUBMIT_DIR|PBS_O_WORKDIR|SGE_O_WORKDIR)$|(?:BASH_SOURCE|0)\b")
#: Commands that print it, without what does not change that.
_PRINTED = re.compile(r"(?:cd )?dirname (?:BASH_SOURCE|0)(?: pwd)?|pwd")
_NOISE = re.compile(r"\[0\]|\s-\S+|[\d&]?>+ ?[\w/&]+|\breadlink\b|\brealpath\b|[\"'$`(){};&]")


def file_beside(
    script: str, word: Word, *, is_moved: bool = False, from_here: bool = False
) -> tuple[str, bytes] | None:
    """Return path and content of a file below a script's directory; None if it is not there.

    Args:
        script: the script.
        word: the file as the script names it.
        is_moved: whether the script has changed its directory, so that a relative name means another file.
        from_here: whether it may lie below the current directory as well: the script is run in that.
    """
    below = _below(word, is_moved=is_moved)
    name = word.value if below is None else below
    if not name or not name.isprintable() or not Path(script).is_file():
        return None
    if below is None and is_moved and not name.startswith("/"):
        return None
    folder = Path(script).parent
    for start in (folder, Path()):
        path = start / name
        try:
            owners = [folder.resolve(), *([Path().resolve()] if from_here else [])]
            is_own = path.is_file() and any(_is_own(path.resolve(), owner) for owner in owners)
            data = read(path) if is_own else b""
        except (OSError, RuntimeError, ValueError, UsageError):
            continue
        if data and not why_not_read(data):
            return str(path), data
    return None


def leads_here(script: str, word: Word, *, is_moved: bool) -> bool:
    """Return whether ``cd`` to a word leads to a script's directory, or to that where it was submitted."""
    value = word.value
    if value is None:
        return _below(word, is_moved=is_moved) == ""
    if not value.startswith("/"):
        return Path(value) == Path() and not is_moved
    return Path(value) == Path(script).parent.absolute()


def _below(word: Word, *, is_moved: bool) -> str | None:
    """Return the name below the script's directory of a word that begins with that; None if it does not."""
    first = word.first
    if first is None or first.value is not None:
        return None
    if first.kind == "command":
        printed = printed_by(first)
        is_here = bool(_PRINTED.fullmatch(printed)) and not (is_moved and printed == "pwd")
    else:
        is_here = bool(_HERE.match(first.text)) and not (is_moved and first.text == "PWD")
    rest = Word(word.parts[1:], word.at, word.end).value
    return rest.lstrip("/") if is_here and rest is not None and rest[:1] in ("", "/") else None


def printed_by(part: Part) -> str:
    """Return a substitution without what changes nothing: ``cd dirname 0 pwd``."""
    return " ".join(_NOISE.sub(" ", part.text).split())


def directory_of(script: str, part: Part, *, is_moved: bool) -> str | None:
    """Return what a substitution prints, if that is the directory of a script; None if it is not."""
    printed = printed_by(part)
    if printed == "pwd" or not _PRINTED.fullmatch(printed):
        return None
    folder = str(Path(script).parent)
    if not re.search("pwd|readlink|realpath", part.text):
        return folder
    return None if is_moved else str(Path(folder).absolute())


def _is_own(path: Path, folder: Path) -> bool:
    """Return whether a file lies below a folder, and in no environment of Python there."""
    parents = [parent for parent in path.parents if parent.is_relative_to(folder)]
    return bool(parents) and not any(
        (each / "pyvenv.cfg").exists() or (each / "conda-meta").exists() for each in parents
    )
