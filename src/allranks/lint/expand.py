"""Words of a script: what they become after expansion, as far as that is known."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from allranks.lint.arithmetic import evaluate
from allranks.lint.model import Context, Part, Script, Use, Word
from allranks.lint.sourced_files import directory_of

if TYPE_CHECKING:
    from tree_sitter import Node

#: A variable's value: its parts, the words of an array, or None where it is not known.
Value = tuple[Part, ...] | tuple[Word, ...] | None

#: Deeper than people nest anything; far less than Python's own limit.
DEEPEST = 60
#: Parts and characters of a value; those of one that is longer are not known.
_PARTS, _CHARACTERS = 500, 20_000
#: Characters of Unicode's private area, around the number of a part that an outer shell has expanded. The first one is
#: in each value of a directive that is not known.
UNKNOWN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{UNKNOWN}(\\d+){_CLOSE}")
#: Variables that schedulers, launchers or logins set.
_SET_ELSEWHERE = re.compile(r"(SLURM|SRUN|PBS|SGE|OMPI|PMIX?|CONDA|JOB|XDG)_.*|\w*PATH|TMPDIR|NSLOTS|HOST(NAME)?|PWD")
_LITERAL = {"word", "number", "extglob_pattern", "regex", "special_variable_name", "variable_name", "test_operator"}


@dataclass(frozen=True)
class Piece:
    """A text that a shell parses: the script itself, or what it hands to another shell."""

    data: bytes  # The text; what an outer shell has put in is a number between marks.
    offsets: tuple[int, ...] | None = None  # Of each byte, where it stands in the file; None: at the same offset.
    marked: tuple[Part, ...] = ()  # The parts that the numbers stand for.
    start: int = 0  # Where it starts, if it is a file that the script reads.

    def at(self, offset: int) -> int:
        """Return where a byte stands in the file."""
        if self.offsets is None:
            return self.start + offset
        return self.offsets[min(offset, len(self.offsets) - 1)] if self.offsets else 0


@dataclass
class Run:
    """How a script is run here: what prints its directory has a value then, and so have variables with a default."""

    arguments: Mapping[str, dict[str, Value]] = field(default_factory=dict)  # Of its functions, by their names.
    #: The defaults that count, each with where it stands, by the variable that has no other value.
    defaults: dict[str, tuple[int, str]] = field(default_factory=dict)


class Expander:
    """Expands words, with the variables that are known at a place.

    Args:
        script: the model; uses of variables are added to it.
        known: variables that the scheduler sets, whose values follow from the directives.
    """

    def __init__(self, script: Script, known: dict[str, str]) -> None:
        self.script = script
        self.run: Run | None = None  # Set if it is to be read as it runs.
        self.known = known
        self.values: dict[str, Value] = {}
        self._piece = Piece(b"")
        self._order = 0
        self._depth = 0

    def forget_arguments(self) -> None:
        """Forget ``$1``, ``$@`` and so on: those of a function, or after ``shift``, are others."""
        kept = self.values.items()
        self.values = {name: value for name, value in kept if not name.isdecimal() and name not in ("@", "*")}

    def _substitution(self, node: Node, context: Context) -> None:
        """Walk over the commands of a substitution."""
        raise NotImplementedError

    def _words(self, node: Node, context: Context) -> list[Word]:
        """Return what a word of the source becomes: one word, or with unquoted variables several."""
        at, end = self._span(node)
        array = self._array(node)
        if array is not None:
            return [replace(word, at=at, end=end) for word in array]
        return split_words(self._parts(node, context, ""), at, end)

    def _append(self, words: list[Word], node: Node, context: Context, end: int) -> None:
        """Append the words of a node to those of a command, the last of which may end here: ``_$NAME.log`` is split."""
        more = self._words(node, context)
        if words and more and self._piece.data[end : node.start_byte] in (b"", b"\\\n"):
            last = words.pop()
            more[0] = Word((*last.parts, *more[0].parts), last.at, more[0].end)
        words += more

    def _array(self, node: Node) -> tuple[Word, ...] | None:
        """Return the words of ``${NAME[@]}``, if the node is that and they are known."""
        if node.type == "string" and node.named_child_count == 1:
            node = node.named_children[0]
        source = self._source(node)
        if source in ("$@", "$*") or (node.type == "expansion" and source.endswith(("[@]}", "[*]}"))):
            name = source[2:-4] or source[1:]
        else:
            return None
        items = () if name == "@" and self.values.get(name) == () else array_of(self.values.get(name))
        if items is not None:
            self._use(name, node, Context(), "")
        return items

    def _parts(self, node: Node, context: Context, quote: str) -> list[Part]:
        kind, start, end, level = node.type, node.start_byte, node.end_byte, context.level
        if kind == "raw_string":
            return self._literal(start + 1, end - 1, "'", level) or [
                Part("text", "", "", "'", level, self._piece.at(start))
            ]
        if kind == "ansi_c_string":
            return self._literal(start + 2, end - 1, "'", level)
        if kind in ("string", "translated_string"):
            start += 2 if kind == "translated_string" else 1
            parts = self._filled(node, context, '"', start, max(start, end - 1))
            return parts or [Part("text", "", "", '"', level, self._piece.at(node.start_byte))]
        if kind == "concatenation":
            return [part for child in node.children for part in self._parts(child, context, quote)]
        if kind in ("simple_expansion", "expansion"):
            return self._variable(node, context, quote)
        if kind in _LITERAL or not node.child_count:
            return self._unescaped(start, end, quote, level)
        source, at = self._source(node), self._piece.at(start)
        if kind == "arithmetic_expansion":
            for child in below(node, "variable_name"):
                self._use(self._source(child), child, context, quote)
            source = source.lstrip()
            return [Part("arithmetic", source, evaluate(source[3:-2], self._number), quote, level, at)]
        if kind in ("command_substitution", "process_substitution"):
            before = len(self.script.commands)
            self._substitution(node, context)
            part = Part("command", source.lstrip(), None, quote, level, at)
            is_known = self.run and kind == "command_substitution"
            return [replace(part, value=self._printed(part, before)) if is_known else part]
        return [Part("command", source, None, quote, level, at)]

    def _printed(self, part: Part, before: int) -> str | None:
        """Return what a substitution prints that names a directory; ``before`` is the number of commands before it."""
        if self.script.kind == "plain":
            path = self.script.text.file_of(part.at).path
            if found := directory_of(path, part, is_moved="PWD" in self.values):
                return found
        inner = self.script.commands[before:]
        is_one = len(inner) == 1 and len(inner[0].args) == 1 and inner[0].name in ("dirname", "basename")
        value = inner[0].args[0].value if is_one else None
        return value and (str(PurePath(value).parent) if inner[0].name == "dirname" else PurePath(value).name)

    def _filled(
        self, node: Node, context: Context, quote: str, start: int, end: int, skip: tuple[str, ...] = ()
    ) -> list[Part]:
        """Return the parts of a string or heredoc: its expansions, and the text around them."""
        parts: list[Part] = []
        position = start
        for child in node.children:
            if child.type in skip or quote == "'":
                end = child.start_byte if child.type in skip else end
                continue
            if child.type in ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"):
                # The grammar takes blanks before an expansion in a string for a part of it.
                source = self._piece.data[child.start_byte : child.end_byte]
                start = child.start_byte + len(source) - len(source.lstrip())
                parts += self._unescaped(position, start, quote, context.level)
                parts += self._parts(child, context, quote)
                position = child.end_byte
        take = self._literal if quote == "'" else self._unescaped
        return parts + take(position, end, quote, context.level)

    def _literal(self, start: int, end: int, quote: str, level: int) -> list[Part]:
        """Return text as it stands, apart from what an outer shell has put in."""
        text = self._piece.data[start:end].decode("utf-8", "surrogateescape")
        parts: list[Part] = []
        position = 0
        for mark in [*_MARK.finditer(text), None] if self._piece.marked else [None]:
            plain = text[position : mark.start() if mark else len(text)]
            if plain:
                at = self._piece.at(start + len(text[:position].encode("utf-8", "surrogateescape")))
                is_verbatim = self._piece.offsets is None
                parts.append(Part("text", plain, plain, quote, level, at, is_verbatim=is_verbatim))
            if mark:
                parts += self._piece.marked[int(mark[1]) : int(mark[1]) + 1]
                position = mark.end()
        return parts

    def _unescaped(self, start: int, end: int, quote: str, level: int) -> list[Part]:
        """Return text without the backslashes that the shell removes."""
        data = self._piece.data[start:end]
        if b"\\" not in data:
            return self._literal(start, end, quote, level)
        parts: list[Part] = []
        position = start
        for match in re.finditer(rb"\\(.|\n)", data):
            escaped = match[1]
            if quote and escaped not in (b"$", b"`", b'"', b"\\", b"\n"):
                continue
            parts += self._literal(position, start + match.start(), quote, level)
            if escaped != b"\n":
                text = escaped.decode("utf-8", "replace")
                parts.append(Part("text", text, text, quote or "'", level, self._piece.at(start + match.start())))
            position = start + match.end()
        return parts + self._literal(position, end, quote, level)

    def _variable(self, node: Node, context: Context, quote: str) -> list[Part]:
        source, at = self._source(node).lstrip(), self._piece.at(node.start_byte)
        if digit := re.fullmatch(r"\$(\d)(\w+)", source):  # $1_a is $1 and _a.
            self._use(digit[1], node, context, quote)
            first = text_of(self.values.get(digit[1])) or [Part("variable", digit[1], None, quote, context.level, at)]
            found = [replace(part, quote=quote, at=at) for part in first]
            return [*found, Part("text", digit[2], digit[2], quote, context.level, at + len("$1"))]
        names = list(below(node, "variable_name", "special_variable_name"))
        name = self._source(names[0]) if names else source.lstrip("${").rstrip("}")
        has_default = any(child.type in (":-", "-", ":=", "=", ":?", "?", ":+", "+") for child in node.children)
        self._use(name, node, context, quote, has_default=has_default)
        for child in below(node, "command_substitution"):
            self._parts(child, context, quote)
        is_plain = source in (f"${name}", f"${{{name}}}")
        parts = text_of(self.values.get(name))
        if (is_plain or has_default) and parts is not None and ":+" not in source:
            found = [replace(part, quote=quote, at=at, is_verbatim=False) for part in parts]
            return found or [Part("text", "", "", quote, context.level, at)]
        if has_default and self.run and (default := self._default(self.run, name, node, context, quote)) is not None:
            return default
        if any(child.type == "subscript" for child in node.children):
            return [Part("variable", source[2:-1], None, quote, context.level, at)]
        known = self.known.get(name) if is_plain and name not in self.values else None
        return [Part("variable", name, known, quote, context.level, at, has_default=has_default)]

    def _default(self, run: Run, name: str, node: Node, context: Context, quote: str) -> list[Part] | None:
        """Return ``8`` of ``${NAME:-8}`` where nothing else sets the variable; None if that is not known."""
        at = next((at for at, child in enumerate(node.children) if child.type in (":-", "-", ":=", "=")), None)
        if at is None or name in self.values or name in os.environ or _SET_ELSEWHERE.fullmatch(name):
            return None
        parts = [part for child in node.children[at + 1 : -1] for part in self._parts(child, context, quote)]
        if any(part.value is None for part in parts):
            return None
        text, place = "".join(part.value or "" for part in parts), self._piece.at(node.start_byte)
        run.defaults.setdefault(name, (place, text))
        return [Part("variable", name, text, quote, context.level, place, has_default=True)]

    def _expansions(self, node: Node, context: Context) -> None:
        """Note the variables that a test expands, and walk over its substitutions."""
        if node.type in ("simple_expansion", "expansion", "command_substitution", "string", "concatenation"):
            self._parts(node, context, '"')
            return
        for child in node.children:
            if self._depth < DEEPEST:
                self._depth += 1
                self._expansions(child, context)
                self._depth -= 1

    def _use(self, name: str, node: Node, context: Context, quote: str, *, has_default: bool = False) -> None:
        at = self._piece.at(node.start_byte)
        self.script.uses.append(Use(name, at, context.level, self._order, has_default, quote))

    def _number(self, name: str) -> int | None:
        parts = text_of(self.values.get(name))
        text = Word(parts, 0, 0).value if parts else self.known.get(name)
        return int(text) if text and text.isdecimal() and len(text) < 12 else None

    def _span(self, node: Node) -> tuple[int, int]:
        """Return where a node starts and ends in the file."""
        return self._piece.at(node.start_byte), self._piece.at(node.end_byte)

    def _source(self, node: Node) -> str:
        return self._piece.data[node.start_byte : node.end_byte].decode("utf-8", "replace")


def bounded(value: Value) -> Value:
    """Return a value, or None if it is longer than any that is written by hand."""
    if not value:
        return value
    parts = [part for word in value for part in (word.parts if isinstance(word, Word) else (word,))]
    is_short = len(parts) <= _PARTS and sum(len(part.value or part.text) for part in parts) <= _CHARACTERS
    return value if is_short else None


def array_of(value: Value) -> tuple[Word, ...] | None:
    """Return the words of a value that is an array; None if it is none, is empty, or is not known."""
    words = tuple(item for item in value or () if isinstance(item, Word))
    return words or None


def text_of(value: Value) -> tuple[Part, ...] | None:
    """Return the parts of a value that is no array; None if it is one, or is not known."""
    return None if value is None or array_of(value) else tuple(item for item in value if isinstance(item, Part))


def comparable(value: Value) -> tuple[str, ...] | None:
    """Return what two values have in common that are the same, wherever they are set."""
    words = array_of(value)
    if words:
        return tuple(word.shown for word in words)
    parts = text_of(value)
    return None if parts is None else ("", *(part.shown for part in parts))


def below(node: Node, *kinds: str) -> Iterable[Node]:
    """Yield the nodes of some kinds below a node, in their order, and none below those."""
    stack = [*reversed(node.children)]
    while stack:
        child = stack.pop()
        if child.type in kinds:
            yield child
        else:
            stack += reversed(child.children)


def errors(root: Node) -> Iterable[Node]:
    """Yield the nodes of a tree that the parser could not read, or that are missing."""
    stack = [root]
    while stack:
        node = stack.pop()
        if node.type == "ERROR" or node.is_missing:
            yield node
        elif node.has_error:
            stack += reversed(node.children)


def split_words(parts: Sequence[Part], at: int, end: int) -> list[Word]:
    """Split where an unquoted variable has white space in its value."""
    words: list[list[Part]] = [[]]
    for part in parts:
        if part.quote or part.value is None or part.is_verbatim or not re.search(r"\s", part.value):
            if part.value != "" or part.quote:
                words[-1].append(part)
            continue
        pieces = re.split(r"\s+", part.value)
        for position, piece in enumerate(pieces):
            if position:
                words.append([])
            if piece:
                words[-1].append(replace(part, text=piece, value=piece))
    return [Word(tuple(word), at, end) for word in words if word]


def piece_of(words: Sequence[Word]) -> Piece:
    """Return the text that a shell gets, of words with a blank between them."""
    data = bytearray()
    offsets: list[int] = []
    marked: list[Part] = []
    for position, word in enumerate(words):
        if position:
            data += b" "
            offsets.append(word.at)
        for part in word.parts:
            if part.kind == "text":
                encoded = part.text.encode("utf-8", "surrogateescape")
                offsets += range(part.at, part.at + len(encoded)) if part.is_verbatim else [part.at] * len(encoded)
            else:
                encoded = f"{UNKNOWN}{len(marked)}{_CLOSE}".encode()
                marked.append(part)
                offsets += [part.at] * len(encoded)
            data += encoded
    return Piece(bytes(data), tuple(offsets), tuple(marked))
