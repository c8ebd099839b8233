"""Connections of ssh that are kept for a while, so that the next command to a machine needs no exchange of keys.

The user's own settings for that in the configuration of ssh come first, also those that forbid it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from allranks.system.commands import run_one

#: How long a connection is kept that is not used.
_KEPT_SECONDS = 60
#: The user's own settings for it, in a file and in what ``ssh -G`` prints; and where ``ssh -v`` names its files.
_OWN = re.compile(r"^\s*Control(Path|Master)\b", re.IGNORECASE | re.MULTILINE)
_TOLD = re.compile(r"^controlpath ", re.MULTILINE)
_READ = re.compile(r"Reading configuration data (.+?)\r?$", re.MULTILINE)
#: What neither ssh nor its expansion of ControlPath reads as something else.
_PLAIN = re.compile(r"/[\w./+@-]*", re.ASCII)
#: A socket's path has so many bytes at most on all systems (man 7 unix), its zero included.
_SOCKET_BYTES = 104
#: What ssh puts instead of %C, and adds while it makes the socket.
_NAME_BYTES = 40 + 17
#: A directory that is there on all systems, where the path of the one for temporary files is too long.
_SHORT = "/tmp"
#: What ssh may take to read its configuration.
_READ_SECONDS = 10.0


def options(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options that make ssh use a kept connection, and keep a new one; empty where that is impossible."""
    places = [Path(place, f"allranks-ssh-{os.getuid()}") for place in (tempfile.gettempdir(), _SHORT)]
    if own := environ.get("XDG_RUNTIME_DIR"):
        places.insert(0, Path(own, "allranks-ssh"))
    folder = next(filter(_is_usable, places), None)
    if folder is None or _has_own(frozenset(environ.items())):
        return ()
    return ("-oControlMaster=auto", f"-oControlPath={folder}/%C", f"-oControlPersist={_KEPT_SECONDS}")


def _is_usable(folder: Path) -> bool:
    """Make the directory if it is not there; return whether it is ours alone, and a socket can be made in it."""
    if not _PLAIN.fullmatch(str(folder)) or len(str(folder)) + 1 + _NAME_BYTES >= _SOCKET_BYTES:
        return False
    probe = folder / f"{os.getpid()}.probe"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return False
        with socket.socket(socket.AF_UNIX) as one:  # Where it cannot be made, as on a full disk, ssh would exit.
            one.bind(str(probe))
        probe.unlink()
    except OSError:
        return False
    return True


@lru_cache(maxsize=8)
def _has_own(environ: frozenset[tuple[str, str]]) -> bool:
    """Return whether the user has settings for kept connections, for any host; True if ssh cannot tell.

    Cached: following a run calls this twice a second. ssh reads the same files for any host.
    """
    answer = run_one(["ssh", "-v", "-G", "localhost"], dict(environ), seconds=_READ_SECONDS)
    if answer.code or _TOLD.search(answer.out):
        return True
    try:
        return any(_OWN.search(Path(file).read_text(errors="replace")) for file in _READ.findall(answer.err))
    except OSError:
        return True
