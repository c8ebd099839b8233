"""Writes files of a run atomically, its secret key, and the archive of code for its nodes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from allranks import contract
from allranks.errors import LaunchError, RunFolderError

if TYPE_CHECKING:
    from zipfile import ZipFile

#: Bytes of a run's key: its agents authenticate with it, and its ranks sign values that they exchange. It is stored
#: only in a file of mode 600 in the run's directory: not in a plan, script, record, log, environment or command line.
KEY_BYTES = 32
#: Header of an unchecked .pyc, without time and size: sources in the archive do not change (PEP 552).
_UNCHECKED = b"\1\0\0\0" + bytes(8)


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Write ``text`` to a temporary name, flush it to disk and rename it to ``path``.

    Raises:
        RunFolderError: the file cannot be written: the disk is full, or the directory is not ours.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        with open(temporary, "x", encoding="utf-8", errors="surrogateescape", opener=_private) as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise unwritable(path, error) from error


def _private(path: str, flags: int) -> int:
    """Open a file that only this user can read, whatever the umask is."""
    return os.open(path, flags, 0o600)


def write_json(path: Path, value: Any, mode: int = 0o600) -> None:
    """Write ``value`` as indented JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2) + "\n", mode)


def write_key(path: Path, key: bytes) -> None:
    """Write a key, as :func:`write_atomically` does."""
    write_atomically(path, f"{key.hex()}\n")


def read_key(path: Path, fix: str | None = None) -> bytes:
    """Read a key; ``fix`` is what to do if there is none.

    Raises:
        LaunchError: there is none.
    """
    try:
        key = bytes.fromhex(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LaunchError(f"cannot read the key {path}", why=error.strerror, fix=fix) from error
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise LaunchError(f"{path} holds no key", why=f"a key is {2 * KEY_BYTES} hexadecimal digits", fix=fix)
    return key


def read_failure(path: Path, failure: OSError) -> RunFolderError:
    """Return the error for a file or directory of a run that cannot be read."""
    fix = f"ls -ld {shlex.quote(str(path))} shows whose it is"
    return RunFolderError(f"cannot read {path}", why=failure.strerror, fix=fix)


def unwritable(path: Path, error: OSError) -> RunFolderError:
    """Return the error for a file or directory of a run that cannot be written."""
    if isinstance(error, FileNotFoundError) and not path.parent.exists():
        fix = "start it again; allranks prune removes only runs that have ended"
        return RunFolderError(f"{path.parent} is gone", why="it was removed while a run wrote into it", fix=fix)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    is_file = isinstance(error, FileExistsError | NotADirectoryError)
    return RunFolderError(
        f"cannot write {path}",
        why="a file is where a directory must be" if is_file else error.strerror or str(error),
        fix="free some space, or give another directory with --runs-folder"
        if full
        else "--runs-folder DIR with a directory that you may write to",
    )


def copy_node_code(
    target: Path | BinaryIO,
    others: Iterable[Path] = (),
    parts: Iterable[str] = contract.NODE_CODE,
    earlier: Path | None = None,
) -> None:
    """Write the ``parts`` of this package that nodes need into a zip archive that Python runs and imports from.

    It holds sources as well, for other versions of Python. It is not compressed, because unpacking takes longer than
    reading. ``others`` are modules of other packages to include. Where the ``earlier`` archive has the same, ``target``
    becomes a hard link to it: an archive has 2 MB, and takes longer to write than all else of a run.
    """
    from hashlib import blake2b  # These two are imported only by commands that start runs.
    from zipfile import ZipFile

    package = contract.installation()
    files = {"__main__.py": package / "agent" / "__main__.py", **{file.name: file for file in others}}
    for name in parts:
        source = package / name
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            files[f"allranks/{file.relative_to(package).as_posix()}"] = file
    states = [(name, (found := file.stat()).st_mtime_ns, found.st_size) for name, file in files.items()]
    # Compiled modules also say which installation they are of.
    comment = blake2b(repr((sys.version, package, states)).encode(), digest_size=16).hexdigest().encode()
    if isinstance(target, Path) and earlier and _ends_with(earlier, comment):
        with contextlib.suppress(OSError):  # Pruned in the meantime, or a file system without hard links.
            target.hardlink_to(earlier)
            return
    with ZipFile(target, "w") as archive:
        for name, file in files.items():
            _add(archive, file, name)
        archive.comment = comment


def _ends_with(archive: Path, comment: bytes) -> bool:
    """Return whether an archive has this comment, which stands at its end."""
    try:
        with archive.open("rb") as file:
            file.seek(-len(comment), os.SEEK_END)
            return file.read() == comment
    except OSError:
        return False


def _add(archive: ZipFile, source: Path, name: str) -> None:
    """Add a source and its compiled form."""
    from compileall import compile_file
    from importlib.util import cache_from_source
    from zipfile import ZipInfo

    archive.writestr(ZipInfo(name), source.read_bytes())
    if compile_file(source, quiet=2):  # Fails in a read-only installation, which works without, slower.
        data = Path(cache_from_source(str(source))).read_bytes()
        archive.writestr(ZipInfo(f"{name}c"), data[:4] + _UNCHECKED + data[16:])
