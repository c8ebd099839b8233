"""Writes files of a run atomically."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

from allranks.errors import RunFolderError


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Write ``text`` to a temporary name, flush it to disk and rename it to ``path``.

    Raises:
        RunFolderError: the file cannot be written: the disk is full, or the directory is not ours.
    """
    import tempfile  # Here, since it imports half a dozen modules that readers do not need.

    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as stream:
            os.fchmod(descriptor, mode)
            stream.write(text)
            stream.flush()
            os.fsync(descriptor)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
        raise unwritable(path, error) from error


def write_json(path: Path, value: Any, mode: int = 0o600) -> None:
    """Write ``value`` as indented JSON, whole or not at all."""
    write_atomically(path, json.dumps(value, indent=2) + "\n", mode)


def unwritable(path: Path, error: OSError) -> RunFolderError:
    """Return the error for a file or directory of a run that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    is_file = isinstance(error, FileExistsError | NotADirectoryError)
    return RunFolderError(
        f"cannot write {path}",
        why="a file is where a directory must be" if is_file else error.strerror or str(error),
        fix="free some space, or give another directory with --runs-folder"
        if full
        else "--runs-folder DIR with a directory that you may write to",
    )
