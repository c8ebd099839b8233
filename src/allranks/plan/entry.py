"""What the ranks run: found, looked at, and refused early when it cannot work."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tokenize
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from allranks.errors import JobError

if TYPE_CHECKING:
    from allranks.job.spec import Job

_ELF = b"\x7fELF"


@dataclass(frozen=True)
class Entry:
    """What the ranks run: the kind, and the absolute path or the module's name."""

    kind: Literal["script", "module", "binary"]
    target: str


def name_of(job: Job) -> str:
    """Return the job's name: as given, else that of what it runs, fit for a folder's name."""
    if job.name:
        return job.name
    target = job.module.rpartition(".")[2] if job.module else Path(job.script or job.binary or "").stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", target).strip("-.")[:64] or "job"


def find_entry(job: Job, workdir: Path, *, same_python: bool) -> Entry:
    """Find what the job runs.

    Args:
        job: the job.
        workdir: absolute working directory of the ranks.
        same_python: whether the ranks run on this interpreter, so that its syntax is theirs.

    Raises:
        JobError: it is not there, or it is no Python.
    """
    if job.module:
        return Entry("module", job.module)
    if job.binary:
        return Entry("binary", _find_binary(job.binary, workdir))
    assert job.script is not None
    path = Path(os.path.normpath(workdir / job.script))
    _check_script(path, job.script, same_python)
    return Entry("script", str(path))


def _find_binary(name: str, workdir: Path) -> str:
    local = workdir / name
    found = shutil.which(str(local)) if os.sep in name else shutil.which(name) or shutil.which(str(local))
    if found:
        return str(Path(found).absolute())
    why = "it is not executable" if local.is_file() else "there is no such program here or on PATH"
    raise JobError(f"cannot run {name}", why=why, fix=f"chmod +x {name}" if local.is_file() else None)


def _check_script(path: Path, name: str, same_python: bool) -> None:
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise JobError(f"{name} is a folder without a __main__.py", fix="name the script itself")
        return
    if not path.is_file():
        raise JobError(f"there is no script {name}", why=f"looked for {path}", fix=_did_you_mean(path))
    try:
        with path.open("rb") as stream:
            start = stream.read(4096)
    except OSError as error:
        raise JobError(f"cannot read {name}", why=error.strerror) from error
    if path.suffix not in (".pyz", ".pyc", ".zip"):
        _check_python(path, name, start, same_python)


def _check_python(path: Path, name: str, start: bytes, same_python: bool) -> None:
    shebang = start.split(b"\n", 1)[0] if start.startswith(b"#!") else b""
    if start.startswith(_ELF) or (shebang and b"python" not in shebang):
        raise JobError(
            f"{name} is no Python script",
            why="it is a program of its own",
            fix=f"allranks run --binary {name}",
        )
    if not same_python:
        return
    try:
        with tokenize.open(path) as stream:
            compile(stream.read(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        version = ".".join(map(str, sys.version_info[:2]))
        raise JobError(
            f"{name}{line} is no Python {version}", why=text, fix="for a program that is no Python: --binary"
        ) from error


def _did_you_mean(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    near = get_close_matches(path.name, [other.name for other in path.parent.glob("*.py")], n=1)
    return f"did you mean {near[0]}?" if near else None
