"""Bytes of one stream into complete lines: unfinished lines wait, endless ones are cut, ``\\r`` overwrites."""

from __future__ import annotations

#: A line longer than this is passed on in pieces, so that memory stays bounded.
LONGEST = 1 << 20


class LineCutter:
    """Cuts what one stream wrote into blocks: complete lines, each ending in ``\\n``."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes of the stream, at most ``LONGEST``, and return the lines that are complete now."""
        cut = chunk.rfind(b"\n") + 1
        if not cut:
            return self._hold(self._rest + chunk)
        block = _shorten_first(_tidy(b"".join((self._rest, memoryview(chunk)[:cut]))))
        self._rest = b""
        return block + self._hold(chunk[cut:])

    def end(self) -> bytes:
        """Return the unfinished line, finished: the stream has ended."""
        rest, self._rest = self._rest, b""
        return _tidy(rest + b"\n") if rest else b""

    def progress(self) -> bytes | None:
        """Return the text of an unfinished line that is drawn with ``\\r``: a progress bar."""
        if b"\r" not in self._rest:
            return None
        return self._rest.strip(b"\r").rpartition(b"\r")[2] or None

    def unfinished(self) -> bytes:
        """Return the text of an unfinished line that is not drawn: a prompt, or the first half of a line."""
        return b"" if b"\r" in self._rest else self._rest

    def _hold(self, text: bytes) -> bytes:
        if b"\r" in text:
            body = text.rstrip(b"\r")
            # A bar that runs for hours is one line: keep only what it shows now. The \r before it stays, so
            # that the finished line is known for a bar; the one after it stays, as \n may follow.
            text = body[max(body.rfind(b"\r"), 0) :] + (b"\r" if len(body) < len(text) else b"")
        pieces = []
        while len(text) > LONGEST:
            cut = _boundary(text, LONGEST)
            pieces.append(_tidy(text[:cut] + b"\n"))
            text = text[cut:]
        self._rest = text
        return b"".join(pieces)


def _tidy(block: bytes) -> bytes:
    """Make ``\\r\\n`` end a line like ``\\n``, and keep of each line what stands after its last ``\\r``."""
    block = block.replace(b"\r\n", b"\n")
    if b"\r" not in block:
        return block
    kept = []
    for line in block[:-1].split(b"\n"):
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        if b"\r" not in line or shown.strip():
            kept.append(shown + b"\n")
    return b"".join(kept)


def _shorten_first(block: bytes) -> bytes:
    """Cut the first line in pieces if it is too long; the others came whole in a chunk and are not."""
    end = block.find(b"\n")
    if end <= LONGEST:
        return block
    pieces, start = [], 0
    while end - start > LONGEST:
        cut = _boundary(block, start + LONGEST)
        pieces.append(block[start:cut])
        start = cut
    return b"\n".join([*pieces, block[start:]])


def _boundary(text: bytes, cut: int) -> int:
    """Move a cut back so that it does not split a UTF-8 character; other bytes are cut where they are."""
    for back in range(4):
        if text[cut - back] & 0xC0 != 0x80:
            return cut - back
    return cut
