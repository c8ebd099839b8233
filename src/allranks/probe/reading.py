"""Reading what the kernel tells in files."""

from __future__ import annotations

from pathlib import Path


def text_of(path: Path) -> str:
    """Return what a file says; nothing where it cannot be read, as the speed of a card without a cable."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def command_of(pid: int) -> list[str]:
    """Return the words of a process's command; a single empty one for a process that has ended."""
    return text_of(Path(f"/proc/{pid}/cmdline")).rstrip("\0").split("\0")
