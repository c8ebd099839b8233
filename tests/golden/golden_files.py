"""Golden files: some are whole, the others are variants: the lines in which they differ from a whole one.

``ALLRANKS_UPDATE_GOLDEN=1 pytest tests/golden`` updates both; read the difference before you commit it. A new text
becomes a variant of the complete file that it differs from least; create an empty file of its name to keep it whole.
"""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from difflib import SequenceMatcher
from pathlib import Path

_HERE = Path(__file__).parent
_HEADER = re.compile(r"=== (\S+)(?: differs from (\S+))?")


def own_lines(script: str, prefix: str = "#!") -> list[str]:
    """Return the lines of a script but for empty ones and its scheduler's directives with their comments."""
    lines = [line for line in script.splitlines() if line]
    last = max((number for number, line in enumerate(lines) if line.startswith(prefix)), default=0)
    return [*lines[:2], *lines[max(2, last + 1) :]]


class StaleVariantError(AssertionError):
    """A variant removes lines that its base does not have there."""


class Golden:
    """The golden files of one folder: the whole ones, and ``<folder>.variants`` beside it."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._variants = folder.with_suffix(".variants")

    def names(self, *suffixes: str) -> list[str]:
        """Return the names of all files, whole or not; of those with these suffixes if any are given."""
        names = {*self._whole(), *self._sections()}
        return sorted(name for name in names if not suffixes or Path(name).suffix in suffixes)

    def read(self, name: str) -> str:
        """Return the complete text of one file."""
        whole = self._folder / name
        if whole.exists():
            return whole.read_text()
        base, changes = self._sections()[name]
        return patched((self._folder / base).read_text() if base else "", changes)

    def compare(self, name: str, text: str) -> None:
        """Compare a text with the golden file; update that first if ALLRANKS_UPDATE_GOLDEN is set."""
        if os.environ.get("ALLRANKS_UPDATE_GOLDEN"):
            self._update(name, text)
        golden = self.read(name)
        assert text == golden, "\n".join([f"{name} differs:", *difference(golden, text)])

    def _whole(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self._folder.iterdir()}

    def _sections(self) -> dict[str, tuple[str, list[str]]]:
        """Return each variant's base, empty if it has none, and the lines in which it differs."""
        sections: dict[str, tuple[str, list[str]]] = {}
        for line in self._variants.read_text().split("\n")[:-1] if self._variants.exists() else []:
            if header := _HEADER.fullmatch(line):
                name, base = header.groups(default="")
                sections[name] = base, []
            else:
                sections[name][1].append(line)
        return sections

    def _update(self, name: str, text: str) -> None:
        variants = {}
        for variant in {*self._sections()} - {name}:
            # Its base was edited or removed by hand: the variant's own test writes it again.
            with suppress(StaleVariantError, FileNotFoundError):
                variants[variant] = self.read(variant)
        if (self._folder / name).exists():
            (self._folder / name).write_text(text)
        else:
            variants[name] = text
        whole = self._whole()
        sections = [_section(name, text, whole) for name, text in sorted(variants.items())]
        if sections:
            self._variants.write_text("\n".join(line for section in sections for line in section) + "\n")


def difference(base: str, text: str) -> list[str]:
    """Return the lines in which a text differs from its base, each group below its line number in the base."""
    old, new = base.split("\n"), text.split("\n")
    lines = []
    for tag, start, end, first, last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            lines += [f"@@ line {start + 1}", *("-" + line for line in old[start:end])]
            lines += ["+" + line for line in new[first:last]]
    return lines


def patched(base: str, changes: list[str]) -> str:
    """Apply what ``difference`` returned to the base: the complete text again."""
    old, new, done = base.split("\n"), [], 0
    for line in changes:
        mark, words = line[:1], line[1:]
        if mark == "@":
            start = int(line.removeprefix("@@ line ")) - 1
            new += old[done:start]
            done = start
        elif mark == "+":
            new.append(words)
        elif old[done : done + 1] == [words]:
            done += 1
        else:
            raise StaleVariantError(f"line {done + 1} of the base is not {words!r}: update the golden files")
    return "\n".join(new + old[done:])


def _section(name: str, text: str, whole: dict[str, str]) -> list[str]:
    """Return a variant as lines: the complete file that it differs from least, and how."""
    alike = sorted(base for base in whole if Path(base).suffix == Path(name).suffix)
    if not alike:
        return [f"=== {name}", *difference("", text)]
    differences = {base: difference(whole[base], text) for base in alike}
    base = min(alike, key=lambda base: len(differences[base]))
    return [f"=== {name} differs from {base}", *differences[base]]


def golden_of(kind: str) -> Golden:
    """Return the golden files of one directory here."""
    return Golden(_HERE / kind)


def assert_bash(script: str) -> None:
    """Have bash parse a script without running it."""
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
