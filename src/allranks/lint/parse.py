"""From the text of a script to its model: a walk over the tree of tree-sitter's grammar of bash. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from os.path import realpath
from typing import TYPE_CHECKING

from allranks.lint.control_flow import SKIPPED, ControlFlow
from allranks.lint.expand import DEEPEST, Piece, Value, array_of, below, bounded, errors, text_of
from allranks.lint.files import other_kind
from allranks.lint.model import (
    LAUNCHERS,
    REMOTE,
    Assignment,
    Command,
    Context,
    Directive,
    Part,
    Script,
    Submitted,
    Word,
)
from allranks.lint.sourced_files import file_beside, leads_here

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

#: Bytes that are parsed for one file, with what shells in it are handed.
_BUDGET = 2 << 20
#: Commands of a file, and words of a command, that are kept.
_COMMANDS, _WORDS = 3000, 2000
#: Files that are read beside one.
_FILES = 20
_CUT = re.compile(rb"(?<!\\)\\[ \t]+#")
#: A backslash before an empty line or at the very end: bash ends the command there, and the grammar does not.
_LAST_BACKSLASH = re.compile(rb"(?<!\\)\\(?=\n?\Z|\n[ \t]*\n)")
#: What stands behind a variable, which the grammar then takes for text if another one stands before it in the word:
#: ``$A/$B/c``. In ``${...}`` and ``((...))`` it is right.
_BEHIND = re.compile(rb"\(\((?:[^()\n]|\([^()\n]*\))*\)\)|\$\{[^{}\n]*\}|(?<![\\$])(\$\w+)[/.,:+\-]")
#: An argument of the script, whose number it takes for text there.
_ARGUMENT = re.compile(rb"(?<![\\$])\$\d(?!\w)")
_END_OF_LINE = re.compile(rb"(?<!\\)\n")
#: The depth of the statements of a script and of functions and branches in it, roughly.
_TOP = 12
#: Words that end a statement, or go on with it.
_ENDS = frozenset({b"done", b"fi", b"esac", b"then", b"do", b"elif", b"else"})
#: Programs for which it counts what a branch has set.
_LAUNCHING = REMOTE | LAUNCHERS
#: Commands that give values to the variables that they name.
_READERS = {"read", "mapfile", "readarray", "getopts", "let", "printf"}


@cache
def _parser() -> Parser:
    import tree_sitter_bash  # Here, since only this verb needs it.
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


class Walker(ControlFlow):
    """Walks over a script and fills in its model, which has its directives already.

    The scheduler sets the ``known`` variables. ``unwrap`` is called with each command, to walk over what that starts.
    """

    def __init__(self, script: Script, known: dict[str, str], unwrap: Callable[[Walker, Command], None]) -> None:
        super().__init__(script, known)
        self._unwrap = unwrap
        self._budget = _BUDGET
        self._open = [realpath(script.path)]  # The files that are being walked over, the innermost last.

    def _parse(self, data: bytes) -> Node | None:
        """Return the tree of a text; None once all together are too long."""
        self._budget -= len(data) + 100
        if self._budget < 0:
            return None
        # Names and texts are read from the data itself: only the kinds of characters count here, and their number.
        data = _BEHIND.sub(lambda found: found[1] + b"%" if found[1] else found[0], _LAST_BACKSLASH.sub(b" ", data))
        return _parser().parse(_ARGUMENT.sub(b"$a", data)).root_node

    def walk(self, piece: Piece, context: Context, root: Node | None = None) -> None:
        """Walk over a text in a context; over its tree, if it is parsed already."""
        root = root or self._parse(piece.data)
        if self._depth > DEEPEST or root is None or (root.has_error and self._depth and not piece.start):
            return  # Of a text with an error we read a part only: what seems to be missing may be there.
        outer, self._piece = (self._piece, self._last), piece
        self._last = {self._source(child.children[0]): child.start_byte for child in below(root, "variable_assignment")}
        self._depth += 1
        if root.has_error and self._depth == 1:
            self.script.broken += [piece.at(node.start_byte) for node in errors(root)]
            self.script.unparsed["the script"] = self.script.broken[0], piece.data
        if self._depth == 1 or piece.start:
            spans = [child for child in root.children if child.type not in SKIPPED]
            owner = self.script.text.file_of(piece.start) if piece.start else self.script
            owner.statements = [(piece.at(child.start_byte), piece.at(child.end_byte)) for child in spans]
        for match in _CUT.finditer(piece.data) if self._depth == 1 and not piece.start else ():
            node = root.descendant_for_byte_range(match.end() - 1, match.end())
            if node is not None and node.type == "comment" and node.start_byte == match.end() - 1:
                self.script.cut_by_comment.append(piece.at(match.start()))
        self._block(root, context)
        self._depth -= 1
        self._piece, self._last = outer

    def include(self, word: Word, at: int, context: Context, *, is_sourced: bool) -> bool:
        """Walk over a file that the command at an offset reads, if it lies below the script's directory.

        Returns whether it lies there.
        """
        found = self._beside(word)
        if found is None or realpath(found[0]) in self._open:
            return found is not None
        path, data = found
        root = self._parse(data)
        if root is None or root.has_error:
            if root and not context.is_conditional:
                self.script.unparsed.setdefault(path, (at, data))
            return True
        self._open.append(realpath(path))
        start = self.script.text.include(path, data, at, is_sourced=is_sourced).start
        self.walk(Piece(data, start=start), context, root)
        self._open.pop()
        return True

    def submit(self, word: Word, at: int, directives: list[Directive], values: dict[str, Value]) -> None:
        """Note a file that the command at an offset submits, if it lies below the script's directory."""
        found, text = self._beside(word), self.script.text
        if found and realpath(found[0]) not in map(realpath, (file.path for file in text.files)):
            start = text.include(*found, at, is_sourced=False).start
            self.script.submitted.append(Submitted(found[1], start, directives, values))

    def _beside(self, word: Word) -> tuple[str, bytes] | None:
        """Return path and content of a shell script below the script's directory."""
        files, is_moved = self.script.text.files, "PWD" in self.values
        if len(files) > _FILES:
            return None
        found = file_beside(files[0].path, word, is_moved=is_moved, from_here=self.run is not None)
        return None if found is None or other_kind(*found) else found

    def move(self, word: Word | None) -> None:
        """Note where ``cd`` leads: PWD is among the values, and not known, elsewhere than beside the script."""
        is_moved = self.values.pop("PWD", ()) is None
        if word is None or not leads_here(self.script.path, word, is_moved=is_moved):
            self.values["PWD"] = None

    # --- statements ---------------------------------------------------------------------------------------------

    def _statement(self, node: Node, context: Context) -> None:
        _HANDLERS.get(node.type, Walker._block)(self, node, context)

    def _command(self, node: Node, context: Context, redirects: Sequence[tuple[str, Word]] = ()) -> None:
        alone = self._lines_above(node)
        for child in node.children[:alone]:
            if child.type == "variable_assignment":
                self._assignment(child, context)
        self._order += 1
        order = self._order
        sets: list[Assignment] = []
        words: list[Word] = []
        inner = [*redirects, *context.redirects]
        context, end = replace(context, redirects=()), -1
        for child in node.children[alone:]:
            if child.type == "variable_assignment":
                sets.append(self._assign(child, context, is_exported=True, is_prefix=True))
            elif child.type == "command_name":
                self._check_name(child)
                for part in child.children:
                    words += self._words(part, context)
            elif child.type in ("file_redirect", "herestring_redirect"):
                inner.append(self._redirect(child, context))
            elif child.is_named and child.type != "comment":
                self._append(words, child, context, end)
            end = child.end_byte
        at = self._piece.at(node.children[alone].start_byte)
        command = Command(tuple(words[:_WORDS]), tuple(sets), at, self._span(node)[1], order, context, tuple(inner))
        self.add(command)
        for word in command.args if command.name in _READERS else ():
            if word.value and word.value.isidentifier():
                self._forget(word.value, command.at, context)
        text = next((word for operator, word in inner if operator == "<<"), None)
        if command.name == "read" and "-d" in command.values and text is not None:  # read -r -d '' NAME <<END
            self.values[command.values[-1]] = bounded(text.parts)

    def _lines_above(self, node: Node) -> int:
        """Return how many parts of a command are assignments in lines above it, which our parser takes for its own."""
        last = 0
        for place, (child, after) in enumerate(pairwise(node.children), 1):
            if child.type not in ("variable_assignment", "comment"):
                break
            if _END_OF_LINE.search(self._piece.data, child.end_byte, after.start_byte):
                last = place
        return last

    def _test(self, node: Node, context: Context) -> None:
        self.script.tests.append(self._span(node))
        self._expansions(node, context)

    def _check_name(self, node: Node) -> None:
        """Note the end of a statement that has no beginning: our parser takes ``done`` and ``fi`` for programs."""
        if self._depth <= _TOP and self._piece.data[node.start_byte : node.end_byte] in _ENDS:
            self._doubt(node)

    def _doubt(self, node: Node) -> None:
        """Note that bash may find a syntax error in the script itself where our parser found none."""
        if self._piece.offsets is None and not self._piece.start:
            self.script.unparsed.setdefault("the script", (self._piece.at(node.start_byte), self._piece.data))

    def add(self, command: Command) -> None:
        """Put a command into the model, and those that it starts."""
        if len(self.script.commands) == _COMMANDS:
            return
        if command.name in _LAUNCHING or not command.name:
            for part in _before_program(command):
                branch = self._open_choices.get(part.text.partition("[")[0]) if part.value is None else None
                if branch:
                    self.script.branches[branch.at] = branch.outcomes
        self.script.commands.append(command)
        if self._depth < DEEPEST:
            self._unwrap(self, command)

    def _declaration(self, node: Node, context: Context) -> None:
        exports = node.children[0].type == "export" or " -x" in self._source(node)[:12]
        text, (at, end) = self._source(node.children[0]), self._span(node)
        words = [Word((Part("text", text, text, "", 0, at),), at, end)]
        for child in node.children[1:]:
            if child.type == "variable_assignment":
                self._assign(child, context, is_exported=exports)
            elif child.is_named and child.type not in SKIPPED:
                words += self._words(child, context)
                if exports and child.type == "variable_name":
                    self.script.exported.add(self._source(child))
        self._order += 1
        self.script.commands.append(Command(tuple(words), (), at, end, self._order, context))

    def _assignment(self, node: Node, context: Context) -> None:
        self._assign(node, context, is_exported="allexport" in self.script.shell_options)

    def _assign(self, node: Node, context: Context, *, is_exported: bool, is_prefix: bool = False) -> Assignment:
        self._order += 1
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        is_plain = target is not None and target.type == "variable_name"
        name = self._source(target).partition("[")[0] if target is not None else ""
        items: tuple[Word, ...] | None = None
        parts: tuple[Part, ...] | None = ()
        if value is not None and value.type == "array":
            given = (child for child in value.children if child.is_named and child.type != "comment")
            items = tuple(word for child in given for word in self._words(child, context))
        elif value is not None:
            parts = tuple(self._parts(value, context, '"' if value.type != "raw_string" else "'"))
        if any(child.type == "+=" for child in node.children):
            earlier = self.values.get(name)
            if earlier is None:
                parts, items = None, None
            elif items is not None:
                items = (*(array_of(earlier) or ()), *items)
            else:
                before = text_of(earlier)
                parts = None if before is None else (*before, *(parts or ()))
        is_remote = any(command.name in REMOTE for command in context.via)
        kept = parts if items is None and is_plain else None
        at = self._piece.at(node.start_byte)
        done = Assignment(name, kept, at, is_exported, self._order, context.level, items, is_prefix, is_remote)
        self.script.assignments.append(done)
        if not is_prefix:
            self.values[name] = bounded(items if items is not None else done.parts)
            self.script.exported |= {name} if is_exported else set()
        return done

    def _forget(self, name: str, at: int, context: Context) -> None:
        """Note that a variable gets a value that is not known."""
        self.values[name] = None
        self.script.assignments.append(Assignment(name, None, at, False, self._order, context.level))

    def _redirected(self, node: Node, context: Context) -> None:
        redirects: list[tuple[str, Word]] = []
        for child in node.children:
            if child.type in ("file_redirect", "herestring_redirect"):
                redirects.append(self._redirect(child, context))
            elif child.type == "heredoc_redirect":
                if any(part.type == "ERROR" and self._source(part) == "&" for part in child.children):  # <<END &
                    context = replace(context, background=self._piece.at(node.start_byte))
                redirects += self._heredoc(child, context)
        self.script.redirects += redirects
        body = node.child_by_field_name("body")
        if body is None:
            return
        if body.type == "command":
            self._command(body, context, redirects)
        elif body.type in ("while_statement", "for_statement") and any(operator[0] == "<" for operator, _ in redirects):
            self._loop(body, context, reads_input=True)
        else:
            kept = tuple(redirects) if body.type in ("list", "pipeline") else ()
            self._statement(body, replace(context, redirects=kept))

    def _redirect(self, node: Node, context: Context) -> tuple[str, Word]:
        if node.type == "herestring_redirect":
            return "<<<", Word((), *self._span(node))
        operator = "".join(child.type for child in node.children if not child.is_named)
        target = node.child_by_field_name("destination")
        if target is not None and b"\n" in self._piece.data[node.start_byte : target.start_byte]:
            self._doubt(node)  # <placeholder> at the end of a line.
        words = self._words(target, context) if target is not None else []
        at = self._piece.at(node.start_byte)
        return operator, words[0] if words else Word((), at, at)

    def _heredoc(self, node: Node, context: Context) -> list[tuple[str, Word]]:
        found: list[tuple[str, Word]] = []
        quote = '"'
        for child in node.children:
            if child.type == "heredoc_start" and self._source(child)[:1] in "'\"\\":
                quote = "'"
            elif child.type == "heredoc_body":
                parts = self._filled(child, context, quote, child.start_byte, child.end_byte, skip=("heredoc_end",))
                found.append(("<<", Word(tuple(parts), *self._span(child))))
            elif child.type == "file_redirect":
                found.append(self._redirect(child, context))
            elif child.type in ("pipeline", "command", "list", "redirected_statement"):
                self._statement(child, context)
        return found


def _before_program(command: Command) -> Iterator[Part]:
    """Yield the variables among a launcher and its options, without those of the script's arguments."""
    for word in command.words:
        if word.shown.endswith(".py") or word.value == "-m":
            return
        yield from word.variables


_HANDLERS: dict[str, Callable[[Walker, Node, Context], None]] = {
    "command": Walker._command,
    "declaration_command": Walker._declaration,
    "unset_command": Walker._declaration,
    "variable_assignment": Walker._assignment,
    "redirected_statement": Walker._redirected,
    "pipeline": Walker._pipeline,
    "list": Walker._list,
    "if_statement": Walker._if,
    "case_statement": Walker._case,
    "for_statement": Walker._loop,
    "c_style_for_statement": Walker._loop,
    "while_statement": Walker._loop,
    "function_definition": Walker._function,
    "subshell": Walker._subshell,
    "test_command": Walker._test,
}
