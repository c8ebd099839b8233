"""Connections of ssh that are kept for a while: a second command to a machine pays no exchange of keys.

Who has settings for that in the configuration of ssh has the say, also who has forbidden it there.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

#: How long a connection is kept that nobody uses.
_KEPT_SECONDS = 60
#: The user's own settings for it: in a file, and as ``ssh -G`` tells of them; and where ``ssh -v`` tells of its files.
_OWN = re.compile(r"^\s*Control(Path|Master)\b", re.IGNORECASE | re.MULTILINE)
_TOLD = re.compile(r"^controlpath ", re.MULTILINE)
_READ = re.compile(r"Reading configuration data (.+?)\r?$", re.MULTILINE)
#: What neither ssh nor its expansion of ControlPath reads as something else.
_PLAIN = re.compile(r"/[\w./+@-]*", re.ASCII)
#: A socket's path has so many bytes at most on all systems (man 7 unix), its zero included.
_SOCKET_BYTES = 104
#: What ssh puts in place of %C, and adds while it makes the socket.
_NAME_BYTES = 40 + 17
#: A folder that is there on all systems, where the path of the one for temporary files is too long.
_SHORT = "/tmp"
#: What ssh may take to read its configuration.
_READ_SECONDS = 10.0


def keeping(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options that have ssh use a connection that is there, and keep a new one; none where it cannot be.

    Args:
        environ: of ssh.
    """
    folder = _folder(environ)
    if folder is None or not _takes_sockets(folder) or _has_own(frozenset(environ.items())):
        return ()
    return ("-oControlMaster=auto", f"-oControlPath={folder}/%C", f"-oControlPersist={_KEPT_SECONDS}")


def forget(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have nobody use the connection of a command any more: its machine may be gone, and ssh not know it yet.

    Args:
        command: ssh with its options, those of :func:`keeping` included, and the host.
        environ: of ssh.
    """
    ssh, *rest = command
    _asked([ssh, "-O", "stop", *rest], environ)


def _folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of our sockets, which nobody else can read or write; None where there can be none."""
    own = environ.get("XDG_RUNTIME_DIR")
    places = [Path(own, "allranks-ssh")] if own else []
    places += [Path(place, f"allranks-ssh-{os.getuid()}") for place in (tempfile.gettempdir(), _SHORT)]
    return next(filter(_is_private, places), None)


def _is_private(folder: Path) -> bool:
    """Make the folder if it is not there; tell whether it is ours alone, and its path short enough."""
    if not _PLAIN.fullmatch(str(folder)) or len(str(folder)) + 1 + _NAME_BYTES >= _SOCKET_BYTES:
        return False
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _takes_sockets(folder: Path) -> bool:
    """Tell whether a socket can be made there: where it cannot, as on a full disk, ssh would end at once."""
    probe = folder / f"{os.getpid()}.probe"
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(probe))
        probe.unlink()
    except OSError:
        return False
    return True


@lru_cache(maxsize=8)
def _has_own(environ: frozenset[tuple[str, str]]) -> bool:
    """Tell whether ssh is told something about kept connections already, for whatever host, or cannot say.

    It is asked once: whoever follows a run has it run twice a second.
    """
    done = _asked(["ssh", "-v", "-G", "localhost"], dict(environ))  # It reads the same files for any host.
    if done is None or done.returncode or _TOLD.search(done.stdout):
        return True
    try:
        return any(_OWN.search(Path(file).read_text(errors="replace")) for file in _READ.findall(done.stderr))
    except OSError:
        return True


def _asked(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str] | None:
    """Run ssh for what it tells without going anywhere."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_READ_SECONDS,
            check=False,
            start_new_session=True,
        )
    return None
