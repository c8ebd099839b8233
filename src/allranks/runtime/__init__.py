"""Inside each rank: who it is, its device, its process group."""

from __future__ import annotations

import sys


def log(text: str) -> None:
    """Write one line to stderr; a closed terminal or a full disk is not an error."""
    try:
        sys.stderr.write(f"allranks: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # There is no other place to report it.
