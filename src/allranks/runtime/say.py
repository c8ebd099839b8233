"""What the runtime tells the person who watches: on stderr, in one piece, and never a reason to fail."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write a line for the user on stderr; a terminal or disk that is gone is no reason to fail."""
    try:
        sys.stderr.write(f"allranks: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # There is no other place to tell it.
