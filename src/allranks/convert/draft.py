"""A job file in the making: its values, where each came from, and what was decided about the rest of the script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from allranks.lint.model import Part, Word
from allranks.lint.reading import View

Kind = Literal["left out", "changed", "not taken over"]
#: In the order of the report, each with what it means.
KINDS: dict[Kind, str] = {
    "left out": "allranks does it, or a job needs none",
    "changed": "it was a fault, or has another form here",
    "not taken over": "this needs your hand",
}
MOVED = "in a job $0 is the scheduler's copy of the script, in a directory of its own: write the one that is meant"
_VARIABLE = re.compile(rb'"?\$\{?(\w+)')
_DEFAULT_HOME = re.compile(rb"\$\{\w+:?[-=]~[/}]")
#: Variables that have the value of another one, whose own value is followed.
_NESTED = 5
_POSITIONAL = re.compile(r"[0-9@*#]+")


@dataclass(frozen=True)
class Given:
    """A value of the job."""

    value: Any
    line: int  # Its line in the script; 0 where it does not stand in one.
    why: str  # The words of the script that it was made from.


@dataclass(frozen=True)
class Note:
    """What was decided about a part of the script."""

    kind: Kind
    line: int
    what: str


@dataclass
class Draft:
    """A job file in the making."""

    view: View  # The script as lint reads it.
    path: str  # The script's path as it is shown.
    kind: str  # The kind of cluster that it is for.
    arguments: Sequence[str] = ()  # What the script is run with.
    #: By path in the job: ``resources.nodes``. ``environment.setup`` and ``.node_setup`` are lists of Given.
    values: dict[str, Given] = field(default_factory=dict)
    setup: dict[str, list[Given]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    node: str = ""  # Its options of ``allranks node``, where each node's script is started by hand.
    node_rank: str = ""  # The variable of the script, or the number of its argument, that is the node's rank.
    launcher: str = ""  # What starts the ranks in the script; empty if Python is the rank.
    incomplete: bool = False  # An argument of the training has a value that is not known.

    @property
    def is_remote(self) -> bool:
        """Whether its machines share no environment: what is set on the first one does not reach the others."""
        return self.kind in ("ssh", "pdsh")

    @property
    def secrets(self) -> dict[str, Given]:
        """The variables whose values the job takes from where it is started, by name."""
        return {path.rpartition(".")[2]: given for path, given in self.values.items() if given.value == "<secret>"}

    def line(self, at: int) -> int:
        """Return the line of an offset."""
        return self.view.place(at).line

    def put(self, path: str, value: Any, at: int, why: str) -> None:
        """Set a value of the job, from an offset in the script; -1 if it does not stand in it."""
        self.values[path] = Given(value, self.line(at) if at >= 0 else 0, short(why))

    def note(self, kind: Kind, at: int, what: str) -> None:
        """Record what was decided about a part of the script, once."""
        note = Note(kind, self.line(at) if at >= 0 else 0, short(what, 170))
        if note not in self.notes:
            self.notes.append(note)

    def left_out(self, at: int, what: str) -> None:
        """Record what a job does not need."""
        self.note("left out", at, what)

    def changed(self, at: int, what: str) -> None:
        """Record what was a fault, or has another form in a job."""
        self.note("changed", at, what)

    def not_taken(self, at: int, what: str) -> None:
        """Record what needs the user's hand."""
        self.note("not taken over", at, what)

    def command(self, name: str, flags: Iterable[str] = ()) -> str:
        """Return what is typed in place of the script, with the job file of this name."""
        return " ".join(["allranks", "node" if self.node else "run", name, *flags, *filter(None, [self.node])])

    def get(self, path: str) -> Any:
        """Return a value; None if it is not set."""
        return self.values[path].value if path in self.values else None

    def add_line(self, where: str, text: str, at: int) -> None:
        """Add a shell line to ``setup`` or ``node_setup``, once."""
        lines = self.setup.setdefault(where, [])
        if text not in [given.value for given in lines]:
            lines.append(Given(text, self.line(at), ""))

    def source(self, start: int, end: int) -> str:
        """Return a part of the script as it stands there."""
        return self.view.script.text.data[start:end].decode("utf-8", "replace")

    def is_moved(self, at: int, text: str) -> bool:
        """Return whether a text of a batch script asks for the script's place, which is another one in a job."""
        is_own = self.view.script.text.file_of(at) is self.view.script.text.files[0]
        is_batch = self.kind in ("slurm", "pbs", "grid_engine")
        return is_batch and is_own and bool(re.search(r"\$\{?(0\b|BASH_SOURCE)", text))

    def is_home(self, parts: Sequence[Part]) -> bool:
        """Return whether a word starts with a ``~`` that the shell expands: one outside of quotes."""
        if not parts or not re.match(r"~(/|$)", parts[0].value or ""):
            return False
        script, at = self.view.script, parts[0].at
        for _ in range(_NESTED):
            found = _VARIABLE.match(script.text.data, at)
            if _DEFAULT_HOME.match(script.text.data, at):
                return True
            if not found:
                return bool(re.match(rb"[^\"']~", script.text.data[max(at - 1, 0) : at + 1]))
            name = found[1].decode()
            at = max((each.at + len(name) + 1 for each in script.assigned(name) if each.at < at), default=0)
        return False

    def is_set_here(self, name: str) -> bool:
        """Return whether this script alone knows a variable's value: a loop's, an argument, an unexported one."""
        is_own = self.view.script.sets(name.partition("[")[0]) and name not in self.view.script.exported
        is_own = is_own or f"${{{name}:=".encode() in self.view.script.text.data
        return is_own or bool(_POSITIONAL.fullmatch(name))


def short(text: str, most: int = 110) -> str:
    """Return a text of the script as one printable line."""
    line = "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 3]}..."


def shown(words: Iterable[Word]) -> str:
    """Return words as a person would write them."""
    return " ".join(word.shown for word in words)


def home(text: str) -> str:
    """Write a path below ``$HOME`` with ``~``, which the job file expands."""
    return re.sub(r"^\$(HOME|\{HOME\})(?=/|$)", "~", text)


def path_of(word: Word) -> str | None:
    """Return a path that the job file can hold; None if a part of it is not known."""
    text = home(word.shown)
    known = all(part.value is not None or (part.text == "HOME" and text.startswith("~")) for part in word.parts)
    return text if known and text else None
