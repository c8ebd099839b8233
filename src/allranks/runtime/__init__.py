"""The part of allranks inside each rank: identity, device, process group, and the blocks of a training loop."""

from __future__ import annotations

import sys


def log(text: str) -> None:
    """Write one line to stderr; a closed terminal or a full disk is not an error."""
    try:
        sys.stderr.write(f"allranks: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
