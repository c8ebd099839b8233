"""The secret key of a run: its agents authenticate with it, and its ranks sign values that they exchange.

It is stored only in a file of mode 600 in the run's directory: not in a plan, script, record, log, environment or
command line.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from allranks.errors import LaunchError

BYTES = 32


def new() -> bytes:
    """Return a new key."""
    return secrets.token_bytes(BYTES)


def written(key: bytes) -> str:
    """Return a key in the format of its file."""
    return f"{key.hex()}\n"


def read(path: Path, fix: str | None = None) -> bytes:
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
    if len(key) != BYTES:
        raise LaunchError(f"{path} holds no key", why=f"a key is {2 * BYTES} hexadecimal digits", fix=fix)
    return key
