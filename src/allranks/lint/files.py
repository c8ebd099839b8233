"""Which files are read: those that are named, and the scripts of directories."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from allranks.errors import UsageError
from allranks.plan.directives import DIRECTIVE

#: What is read of a file; launch scripts of people have up to some thousand lines.
LARGEST = 256 * 1024
#: How the names of launch scripts end.
_ENDS = (
    *(".sh", ".bash", ".sbatch", ".slurm", ".slm", ".pbs", ".qsub", ".sge"),
    *(".job", ".sub", ".submit", ".batch", ".cmd"),
)
_SHELLS = (b"/sh", b"/bash", b" bash", b" sh", b"/zsh", b"/dash")


def why_not_read(data: bytes) -> str:
    """Return why a file is not a script that can be read; empty if it can."""
    if len(data) > LARGEST:
        return f"larger than {LARGEST // 1024} KiB"
    return "a binary file" if b"\0" in data else ""


def scripts_of(names: Sequence[str]) -> Iterator[Path]:
    """Yield the files that are named, and the scripts in directories that are named, each once."""
    seen: set[Path] = set()
    for name in names:
        path = Path(name)
        for found in _below(path) if path.is_dir() else [path]:
            if found not in seen:
                seen.add(found)
                yield found


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")) and name != "node_modules")
        for name in sorted(files):
            path = Path(root) / name
            if not path.is_symlink() and (name.endswith(_ENDS) or ("." not in name and _starts_a_shell(path))):
                yield path


def _starts_a_shell(path: Path) -> bool:
    try:
        first = _read(path, 64).split(b"\n")[0].rstrip()
    except OSError:
        return False
    return first.startswith(b"#!") and first.split(b" -")[0].endswith(_SHELLS)


def other_kind(name: str, data: bytes) -> str:
    """Return what a file is that its name or first line says is no launch script; empty if it may be one."""
    first = data.split(b"\n", 1)[0]
    shebang = first if first.startswith(b"#!") else b""
    if name.endswith((".yaml", ".yml")) and not shebang:
        return "YAML, as a job file is"
    is_python = b"python" in shebang if shebang else name.endswith(".py")
    return "a Python script" if is_python and not DIRECTIVE.search(data) else ""


def not_for(verb: str, name: str, kind: str) -> UsageError:
    """Make the error for a file of another kind that a verb was to read."""
    this = "this one" if "Python" in kind else "a job file"
    fix = f"{verb} reads launch scripts; allranks check {shlex.quote(name)} checks {this}"
    return UsageError(f"{name} is {kind}", fix=fix)


def read(path: Path) -> bytes:
    """Return the beginning of a file, one byte more than is read at most, so that larger ones are noticed."""
    try:
        return _read(path, LARGEST + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot read {path}", why=reason, fix="allranks lint FILE, DIRECTORY or -") from error


def _read(path: Path, most: int) -> bytes:
    # A pipe without a writer does not block: it is opened so, and then refused.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) and not str(path).startswith(("/dev/fd/", "/proc/self/fd/")):
            raise OSError(0, "not a regular file")
        return file.read(most)
