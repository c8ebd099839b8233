"""The user's own key, for nodes that are started one by one: the runs on them have nothing else in common."""

from __future__ import annotations

import contextlib
import hmac
import secrets
from collections.abc import Mapping
from pathlib import Path

from allranks.errors import LaunchError, RunFolderError
from allranks.job.files import users_folder
from allranks.runs import key
from allranks.runs.files import write_whole

#: Names the file that holds it, where it is not the usual one.
KEY_FILE = "ALLRANKS_KEY_FILE"


def derived(meeting: str, environ: Mapping[str, str]) -> bytes:
    """Return the key of a run, from the user's key and a text that is the same on all nodes.

    Raises:
        LaunchError: there is no folder for the user's key, or its file holds none.
        RunFolderError: it cannot be written.
    """
    given = environ.get(KEY_FILE)
    path = Path(given) if given else _usual(environ)
    if not given and not path.exists():
        _create(path)
    return hmac.digest(key.read(path), meeting.encode(), "sha256")


def _usual(environ: Mapping[str, str]) -> Path:
    folder = users_folder(environ)
    if folder is None:
        raise LaunchError(
            "there is no folder for the key that the nodes of this job know each other by",
            why="HOME is not set",
            fix=f"set HOME, or {KEY_FILE} to a file that is the same on all nodes",
        )
    return folder / "key"


def _create(path: Path) -> None:
    """Write a new key; nodes that share the folder may do so at the same time, and the first one's counts."""
    new = path.with_name(f"key-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(new, key.written(key.new()))
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(new)
        new.unlink()
    except OSError as error:
        fix = f"{KEY_FILE}, with a file that is the same on all nodes: {2 * key.BYTES} hexadecimal digits"
        raise RunFolderError(f"cannot write {path}", why=error.strerror, fix=fix) from error
