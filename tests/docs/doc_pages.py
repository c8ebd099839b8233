"""The project's pages, and what stands in them."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*/*.md")])

_FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_ENDS_COMMAND = frozenset("();<>|&")


class Block(NamedTuple):
    """A fenced block: where it is, the word after the fence, and its text."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the fenced blocks in one of the languages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            if match[2] in languages:
                indent = len(match[1])
                body = "".join(line[indent:] for line in match[3].splitlines(keepends=True))
                found.append(Block(page, text.count("\n", 0, match.start()) + 1, match[2], body))
    return found


def inline_code(page: Path) -> list[str]:
    """Return the code in the running text of a page."""
    return [match.replace("\\|", "|") for match in _INLINE.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))]


def typed(block: Block) -> list[str]:
    """Return the lines of a block that somebody types."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in lines if line.strip()]


def commands(line: str, name: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of the command ``name`` in a line of shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not _ENDS_COMMAND.issuperset(word):
            words.append(word)
            continue
        if words and words[0] == name:
            yield words[1:]
        words = []


def committed_files() -> list[Path]:
    """Return the files that are or would be committed; empty where this is no git checkout."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [path for name in done.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]
