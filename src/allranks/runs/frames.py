"""Tracebacks without the frames of other people's code: ``  … 12 frames in torch``."""

from __future__ import annotations

import re

from allranks.runs.cause import is_foreign

_FRAME = re.compile(rb'  File "([^"]+)", line \d+, in ')
#: What stands below a frame: its source, marked or not, and how often it is repeated.
_BELOW = (b"    ", b"  [Previous line repeated ")
#: The package of a file; what has none is Python's own, or ours.
_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/.]+)|/(allranks)/")


class Frames:
    """Folds the frames that are not in the user's code, of one stream, whose lines come in blocks."""

    def __init__(self) -> None:
        self._count = 0
        self._packages: dict[str, None] = {}

    def fold(self, block: bytes) -> bytes:
        """Return whole lines with such frames folded; those at the end are counted when what follows them is there."""
        if not self._count and b'  File "' not in block:
            return block
        return b"".join(map(self._line, block.splitlines(keepends=True)))

    def end(self) -> bytes:
        """Return the line for the frames that were left out last, if there are any."""
        if not self._count:
            return b""
        frames, packages = f"{self._count} frame{'s' * (self._count > 1)}", ", ".join(self._packages)
        self._count, self._packages = 0, {}
        return f"  … {frames} in {packages}\n".encode()

    def _line(self, line: bytes) -> bytes:
        if found := _FRAME.match(line):
            if is_foreign(file := found[1].decode(errors="replace")):
                self._count += 1
                package = _PACKAGE.search(file)
                self._packages[(package[1] or package[2]) if package else "python"] = None
                return b""
        elif self._count and line.startswith(_BELOW):
            return b""
        return self.end() + line
