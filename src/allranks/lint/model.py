"""What a shell script says, as far as it can be known without running it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

MPI = frozenset({"mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi", "mpiexec.hydra", "orterun"})
#: Commands whose command runs on another machine, or on all nodes of a job.
REMOTE = MPI | frozenset(
    {
        *("srun", "ssh", "rsh", "dsh", "pdsh", "clush", "pssh", "parallel-ssh", "pbsdsh", "pbs_tmrsh", "blaunch"),
        *("jsrun", "aprun", "ibrun"),  # Of IBM, Cray and TACC.
    }
)
LAUNCHERS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed"})


class Place(NamedTuple):
    """A position in a file: line and column, counted from 1."""

    line: int
    column: int


@dataclass
class Included:
    """A file that a script sources or runs."""

    path: str
    start: int  # Where it starts in the text.
    line: int  # Its first line in the text.
    at: int  # The offset of the command that reads it.
    is_sourced: bool  # Whether the shell itself reads it, and knows what it sets afterwards.
    statements: list[tuple[int, int]] = field(default_factory=list)


class Text:
    """The bytes of a script, and where their lines begin; those of the files that it reads follow its own."""

    def __init__(self, data: bytes, path: str = "") -> None:
        self.data = data
        self.size = len(data)  # Of the script itself.
        self._starts = [0, *(at + 1 for at, byte in enumerate(data) if byte == 10)]
        self.files = [Included(path, 0, 1, 0, is_sourced=True)]

    def include(self, path: str, data: bytes, at: int, *, is_sourced: bool) -> Included:
        """Add a file that the command at an offset reads."""
        start = len(self.data) + 2
        self.data += b"\n\n" + data
        self._starts += [start - 1, start, *(start + place + 1 for place, byte in enumerate(data) if byte == 10)]
        self.files.append(Included(path, start, len(self._starts) - data.count(b"\n"), at, is_sourced))
        return self.files[-1]

    def file_of(self, offset: int) -> Included:
        """Return the file in which an offset lies; the script itself is the first."""
        return self.files[bisect_right(self.files, offset, key=lambda file: file.start) - 1]

    def files_of(self, offset: int) -> Iterator[Included]:
        """Yield the file in which an offset lies, the file that reads it, and so on, without the script itself."""
        while (file := self.file_of(offset)) is not self.files[0]:
            yield file
            offset = file.at

    def where(self, line: int) -> tuple[str, int]:
        """Return the file and the line in it of a line of the text."""
        file = self.files[bisect_right(self.files, line, key=lambda file: file.line) - 1]
        return file.path, line - file.line + 1

    def place(self, offset: int) -> Place:
        """Return the position of an offset. Columns count characters."""
        line = bisect_right(self._starts, offset)
        start = self._starts[line - 1]
        return Place(line, len(self.data[start:offset].decode("utf-8", "replace")) + 1)

    def line(self, number: int) -> str:
        """Return a line, counted from 1, without its end."""
        starts = [*self._starts, len(self.data) + 1]
        return self.data[starts[number - 1] : starts[number] - 1].decode("utf-8", "replace")

    @property
    def lines(self) -> int:
        """Number of lines."""
        return len(self._starts)


@dataclass(frozen=True)
class Part:
    """A piece of a word."""

    #: Plain text, or what the shell puts something in the place of.
    kind: Literal["text", "variable", "command", "arithmetic"]
    text: str  # The text, the name of the variable, or the source of the substitution.
    value: str | None  # What it becomes; None if that is not known.
    quote: str  # The quote around it: none, ``'`` or ``"``.
    level: int  # The shell that expands it: 0 is the script's, 1 that of a ``bash -c`` in it, and so on.
    at: int  # Its offset in the file.
    is_verbatim: bool = False  # Whether each byte of the text stands in the file, one after the other from ``at`` on.
    has_default: bool = False  # Whether the script gives a default: ``${NAME:-2}``.

    @property
    def shown(self) -> str:
        """The part as a person would write it."""
        return f"${self.text}" if self.kind == "variable" else self.text


@dataclass(frozen=True)
class Word:
    """One word of a command, after expansion as far as it is known."""

    parts: tuple[Part, ...]
    at: int
    end: int

    @cached_property
    def value(self) -> str | None:
        """The word as the program gets it; None if a part is not known."""
        values = [part.value for part in self.parts]
        return None if None in values else "".join(value for value in values if value is not None)

    @cached_property
    def shown(self) -> str:
        """The word with the names of what is not known."""
        return "".join(part.shown if part.value is None else part.value for part in self.parts)

    @property
    def prefix(self) -> str:
        """What the word certainly begins with."""
        known = ""
        for part in self.parts:
            if part.value is None:
                break
            known += part.value
        return known

    @property
    def first(self) -> Part | None:
        """Its first part; None of an empty word."""
        return self.parts[0] if self.parts else None

    @property
    def number(self) -> int | None:
        """The word as a whole number; None if it is none, or not known."""
        return int(self.value) if self.value and self.value.isdecimal() and len(self.value) < 10 else None

    @property
    def variables(self) -> Iterator[Part]:
        """The expansions of variables in it."""
        return (part for part in self.parts if part.kind == "variable")

    @property
    def is_literal(self) -> bool:
        """Whether its value is given, known, and contains nothing that the scheduler sets."""
        return bool(self.parts) and self.value is not None and not any(self.variables)

    def names(self, *names: str) -> bool:
        """Return whether it expands one of these variables."""
        return any(part.text in names for part in self.variables)

    def after(self, separator: str) -> Word | None:
        """Return what follows the first separator; None if it does not occur."""
        for index, part in enumerate(self.parts):
            if part.kind == "text" and separator in part.text:
                cut = part.text.index(separator) + len(separator)
                rest = Part(part.kind, part.text[cut:], part.text[cut:], part.quote, part.level, part.at + cut)
                return Word(((rest,) if rest.text else ()) + self.parts[index + 1 :], rest.at, self.end)
        return None


@dataclass(frozen=True)
class Assignment:
    """A variable that gets a value."""

    name: str
    parts: tuple[Part, ...] | None  # The value; None if it is an array, or appended to.
    at: int
    is_exported: bool  # Whether this statement exports it, or stands before a command.
    order: int  # The position among all statements.
    level: int = 0
    items: tuple[Word, ...] | None = None  # The words of an array.
    is_prefix: bool = False
    is_remote: bool = False

    @property
    def value(self) -> str | None:
        """The text that it becomes; None if that is not known."""
        return Word(self.parts, self.at, self.at).value if self.parts is not None else None


@dataclass(frozen=True)
class Loop:
    """A loop around a command."""

    kind: Literal["for", "while"]
    variable: str
    words: tuple[Word, ...]
    reads_input: bool
    at: int


@dataclass(frozen=True)
class Context:
    """What stands around a command."""

    via: tuple[Command, ...] = ()  # The commands that start it, the outermost first: ``srun``, ``bash -c``.
    level: int = 0  # The shell that expands its words.
    loops: tuple[Loop, ...] = ()
    function: str = ""
    background: int | None = None  # Where the innermost statement with ``&`` starts that it is in.
    is_conditional: bool = False
    branches: tuple[tuple[int, int], ...] = ()  # Of each if, case or list around it: where it is, and which branch.
    is_condition: bool = False
    is_substitution: bool = False
    pipe: tuple[str, ...] = ()  # The names of the commands that read its output.
    chain: str = ""  # The operator after it, in a list: ``&&``, ``||`` or none.
    redirects: tuple[tuple[str, Word], ...] = ()  # Redirections of the list or pipeline that it ends.

    @property
    def is_background(self) -> bool:
        """Whether the shell goes on without waiting for it."""
        return self.background is not None


@dataclass(frozen=True)
class Command:
    """A command with its words."""

    words: tuple[Word, ...]
    sets: tuple[Assignment, ...]
    at: int
    end: int
    order: int
    context: Context
    redirects: tuple[tuple[str, Word], ...] = ()

    @cached_property
    def name(self) -> str:
        """The program without its directory, also where only that is not known; empty if it is not known itself."""
        word = self.words[0] if self.words else None
        last = (word.parts[-1].value or "") if word and word.parts else ""
        return ((word.value if word else None) or last[last.find("/") + 1 or len(last) :]).rpartition("/")[2]

    @property
    def args(self) -> tuple[Word, ...]:
        """The words after the program."""
        return self.words[1:]

    @property
    def values(self) -> list[str]:
        """The arguments as text, with the names of what is not known."""
        return [word.shown for word in self.args]

    @property
    def variables(self) -> Iterator[Part]:
        """The expansions of variables in its words."""
        return (part for word in self.words for part in word.variables)

    @property
    def text(self) -> str:
        """The arguments in one line."""
        return " ".join(self.values)

    @property
    def first(self) -> str:
        """The first argument; empty if there is none."""
        return self.args[0].shown if self.args else ""

    @property
    def root(self) -> Command:
        """The command of the script itself that starts this one."""
        return self.context.via[0] if self.context.via else self

    def started_by(self, *names: str) -> Command | None:
        """Return the nearest of the commands that start it with one of these names."""
        return next((command for command in reversed(self.context.via) if command.name in names), None)

    def is_expanded_early(self, part: Part, *starters: str) -> bool:
        """Return whether a part is expanded by a shell that itself only starts this command on other machines."""
        names = starters or REMOTE
        return any(outer.name in names and part.level <= outer.context.level for outer in self.context.via)

    def is_expanded_there(self, part: Part) -> bool:
        """Return whether a part is expanded by a shell on the machine of this command."""
        return self.started_by(*REMOTE) is not None and not self.is_expanded_early(part)

    @property
    def has_input(self) -> bool:
        """Whether its standard input is redirected."""
        return any(operator.startswith("<") for operator, _ in self.redirects)


@dataclass(frozen=True)
class Directive:
    """One option of a ``#SBATCH``, ``#PBS`` or ``#$`` line."""

    family: Literal["slurm", "pbs", "grid_engine"]
    name: str  # The long name of the option without hyphens; of PBS and Grid Engine the letter or word.
    value: str  # Its value; empty if it has none.
    at: int
    value_at: int
    is_read: bool  # Whether the scheduler reads it, because it stands before the first command.


@dataclass(frozen=True)
class Use:
    """A place where the script expands a variable."""

    name: str
    at: int
    level: int
    order: int
    has_default: bool
    quote: str


@dataclass
class Submitted:
    """A file that a script submits as a job."""

    data: bytes
    start: int  # Where it starts in the text.
    directives: list[Directive]  # The options of the command, which count more than its own.
    values: dict[str, tuple[Part, ...] | tuple[Word, ...] | None]  # What is known of its arguments and variables.


@dataclass
class Script:
    """A script as the rules see it."""

    path: str
    text: Text
    kind: Literal["slurm", "pbs", "grid_engine", "plain"]
    shebang: str
    directives: list[Directive] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)
    #: What ``set`` and the first line switch on: ``errexit``, ``pipefail``, ``nounset``, ``allexport``, ….
    shell_options: set[str] = field(default_factory=set)
    comments: list[tuple[int, str]] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    #: Where a backslash and blanks stand before a comment, which our parser takes for blanks.
    cut_by_comment: list[int] = field(default_factory=list)
    #: The redirections of commands and of blocks.
    redirects: list[tuple[str, Word]] = field(default_factory=list)
    #: Where each ``[ … ]`` and ``[[ … ]]`` starts and ends.
    tests: list[tuple[int, int]] = field(default_factory=list)
    #: By the name of a text with a syntax error: where it is, or where the text is read, and the text.
    unparsed: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    #: Where each statement of the script itself starts and ends.
    statements: list[tuple[int, int]] = field(default_factory=list)
    first_command: int | None = None
    submitted: list[Submitted] = field(default_factory=list)
    #: Branches that leave a variable of a launcher with different values: where each starts, and its outcomes.
    branches: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def unfolded(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return where statements start and end, with those of a file in the place of the one that sources it."""
        sourced = {file.at: file.statements for file in self.text.files[1:] if file.is_sourced}
        found: list[tuple[int, int]] = []
        for start, end in spans:
            found += self.unfolded(sourced[start]) if start in sourced else [(start, end)]
        return found

    def named(self, *names: str) -> Iterator[Command]:
        """Yield the commands with one of these names."""
        return (command for command in self.commands if command.name in names)

    @property
    def read(self) -> list[Directive]:
        """The directives that its scheduler reads."""
        return [directive for directive in self.directives if directive.is_read and directive.family == self.kind]

    def options(self, *names: str) -> list[Directive]:
        """Return the directives with one of these names that the scheduler reads."""
        return [directive for directive in self.directives if directive.name in names and directive.is_read]

    def option(self, *names: str) -> str | None:
        """Return the value that counts of a directive, which is the last; None if it is not given."""
        found = self.options(*names)
        return found[-1].value if found else None

    def assigned(self, *names: str) -> Iterator[Assignment]:
        """Yield the assignments to one of these variables."""
        return (assignment for assignment in self.assignments if assignment.name in names)

    def sets(self, *names: str) -> bool:
        """Return whether the script gives one of these variables a value anywhere."""
        return any(self.assigned(*names))

    @cached_property
    def used(self) -> frozenset[str]:
        """The variables that it expands."""
        return frozenset(use.name for use in self.uses)

    def switch_on(self, values: Sequence[str | None]) -> None:
        """Note what the words of ``set``, or of the first line, switch on."""
        letters = {"e": "errexit", "u": "nounset", "a": "allexport"}
        for position, value in enumerate(values):
            if value and value.startswith("-") and not value.startswith("--"):
                self.shell_options |= {letters[letter] for letter in value[1:] if letter in letters}
                if value.endswith("o") and position + 1 < len(values):
                    self.shell_options.add(values[position + 1] or "")
