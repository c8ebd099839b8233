"""From the text of a script to its model: a walk over the tree of tree-sitter's grammar of bash. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from os.path import realpath
from typing import TYPE_CHECKING

from allranks.lint.branches import BY_NODES, Branch, leaves, matching, test_result
from allranks.lint.expand import DEEPEST, Expander, Piece, Value, array_of, below, bounded, comparable, errors, text_of
from allranks.lint.files import other_kind
from allranks.lint.model import (
    LAUNCHERS,
    REMOTE,
    Assignment,
    Command,
    Context,
    Directive,
    Loop,
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
_STATEMENTS_SKIPPED = {"comment", "heredoc_body", "\n", ";", ";;", "&", "&&", "||", "|", "|&"}
#: The depth of the statements of a script and of functions and branches in it, roughly.
_TOP = 12
#: Words that end a statement, or go on with it.
_ENDS = frozenset({b"done", b"fi", b"esac", b"then", b"do", b"elif", b"else"})
#: Commands that people expect to succeed: what follows ``&&`` after them is run.
_SURE = {"cd", "pushd", "mkdir", "source", ".", "ulimit", "umask", "unset", "export", "module", "ml", "conda", "sleep"}
#: Programs for which it counts what a branch has set.
_LAUNCHING = REMOTE | LAUNCHERS
#: Commands that give values to the variables that they name.
_READERS = {"read", "mapfile", "readarray", "getopts", "let", "printf"}


@cache
def _parser() -> Parser:
    import tree_sitter_bash  # Here, since only this verb needs it.
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


class Walker(Expander):
    """Walks over a script and fills in its model, which has its directives already.

    The scheduler sets the ``known`` variables. ``unwrap`` is called with each command, to walk over what that starts.
    """

    def __init__(self, script: Script, known: dict[str, str], unwrap: Callable[[Walker, Command], None]) -> None:
        super().__init__(script, known)
        self._unwrap = unwrap
        self._budget = _BUDGET
        self._last: dict[str, int] = {}  # Where each variable is assigned last in the text that is being walked over.
        self._open = [realpath(script.path)]  # The files that are being walked over, the innermost last.
        #: Of branches, by where they start, the outcome that is taken to have happened.
        self.taken: dict[int, int] = {}
        self._open_choices: dict[str, Branch] = {}  # The branches that leave each variable with different values.

    def _parse(self, data: bytes) -> Node | None:
        """Return the tree of a text; None once all together are too long."""
        self._budget -= len(data) + 100
        return None if self._budget < 0 else _parser().parse(data).root_node

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
            spans = [child for child in root.children if child.type not in _STATEMENTS_SKIPPED]
            owner = self.script.text.file_of(piece.start) if piece.start else self.script
            owner.statements = [(piece.at(child.start_byte), piece.at(child.end_byte)) for child in spans]
        for match in _CUT.finditer(piece.data) if self._depth == 1 and not piece.start else ():
            node = root.descendant_for_byte_range(match.end() - 1, match.end())
            if node is not None and node.type == "comment" and node.start_byte == match.end() - 1:
                self.script.cut_by_comment.append(piece.at(match.start()))
        self._block(root, context)
        self._depth -= 1
        self._piece, self._last = outer

    def include(self, word: Word, at: int, context: Context, *, is_sourced: bool) -> None:
        """Walk over a file that the command at an offset reads, if it lies below the script's directory."""
        found = self._beside(word)
        if found is None or realpath(found[0]) in self._open:
            return
        path, data = found
        root = self._parse(data)
        if root is None or root.has_error:
            if root and not context.is_conditional:
                self.script.unparsed.setdefault(path, (at, data))
            return
        self._open.append(realpath(path))
        start = self.script.text.include(path, data, at, is_sourced=is_sourced).start
        self.walk(Piece(data, start=start), context, root)
        self._open.pop()

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

    def _block(self, node: Node, context: Context) -> None:
        """Walk over the statements of a node."""
        context = replace(context, redirects=())
        if self._depth > DEEPEST:
            return
        self._depth += 1
        for child, after in zip(node.children, [*node.children[1:], None], strict=False):
            at = self._piece.at(child.start_byte)
            if child.type == "comment" and context.level == 0:
                self.script.comments.append((at, self._source(child)))
            if child.type in _STATEMENTS_SKIPPED or not (child.is_named or child.type == "ERROR"):
                continue
            is_background = after is not None and after.type == "&"
            self._statement(child, replace(context, background=at) if is_background else context)
        self._depth -= 1

    def _statement(self, node: Node, context: Context) -> None:
        _HANDLERS.get(node.type, Walker._block)(self, node, context)

    def _command(self, node: Node, context: Context, redirects: Sequence[tuple[str, Word]] = ()) -> None:
        self._order += 1
        order = self._order
        sets: list[Assignment] = []
        words: list[Word] = []
        inner = [*redirects, *context.redirects]
        context, end = replace(context, redirects=()), -1
        for child in node.children:
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
        command = Command(tuple(words[:_WORDS]), tuple(sets), *self._span(node), order, context, tuple(inner))
        self.add(command)
        for word in command.args if command.name in _READERS else ():
            if word.value and word.value.isidentifier():
                self._forget(word.value, command.at, context)
        text = next((word for operator, word in inner if operator == "<<"), None)
        if command.name == "read" and "-d" in command.values and text is not None:  # read -r -d '' NAME <<END
            self.values[command.values[-1]] = bounded(text.parts)

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
            elif child.is_named and child.type not in _STATEMENTS_SKIPPED:
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

    def _pipeline(self, node: Node, context: Context) -> None:
        stages = [child for child in node.children if child.is_named and child.type != "comment"]
        names = [self._first_word(stage) for stage in stages]
        before = dict(self.values)
        for position, stage in enumerate(stages):
            pipe = (*names[position + 1 :], *context.pipe)
            kept = context.redirects if position == len(stages) - 1 else ()
            self._statement(stage, replace(context, pipe=pipe, redirects=kept))
        self.values = before

    def _first_word(self, node: Node) -> str:
        name = node.child_by_field_name("name")
        if node.type == "redirected_statement" and node.child_count:
            return self._first_word(node.children[0])
        return self._source(name) if name is not None else node.type

    def _list(self, node: Node, context: Context) -> None:
        operator = next((child.type for child in node.children if child.type in ("&&", "||")), "")
        named = [child for child in node.children if child.is_named and child.type != "comment"]
        result = test_result(named[0], self._known_value) if named else None
        for position, child in enumerate(named):
            if position == 0:
                self._statement(child, replace(context, chain=operator, redirects=()))
            elif operator == "&&" and self._is_sure(node.children[0]):
                self._statement(child, context)
            else:
                is_run = None if result is None else result == (operator == "&&")
                chosen = None if is_run is None else int(is_run)
                tests = self._source(named[0])
                inner = replace(context, is_conditional=True)
                self._branches([[child]], inner, whole=False, chosen=chosen, tests=tests)

    def _is_sure(self, node: Node) -> bool:
        """Return whether what follows ``&&`` after a command, or a list of them, is run where people expect it."""
        if node.type == "list":
            named = [child for child in node.children if child.is_named and child.type != "comment"]
            return "&&" in [child.type for child in node.children] and all(map(self._is_sure, named))
        return node.type == "declaration_command" or self._first_word(node) in _SURE

    def _if(self, node: Node, context: Context) -> None:
        bodies: list[list[Node]] = [[]]
        chosen = self._true_branch(node)
        for child in node.children:
            if child.type == "then":
                bodies.append([])
            elif child.type in ("elif_clause", "else_clause"):
                bodies.append([child])
            elif child.is_named:
                bodies[-1].append(child)
        for child in bodies[0]:
            self._statement(child, replace(context, is_condition=True))
        has_else = any(child.type == "else_clause" for child in node.children)
        tests = " ".join(map(self._source, bodies[0]))
        self._branches(bodies[1:], replace(context, is_conditional=True), whole=has_else, chosen=chosen, tests=tests)

    def _true_branch(self, node: Node) -> int | None:
        """Return which branch of ``if`` is run, counted from 1, 0 for none; None if that is not known."""
        clauses = [node, *(child for child in node.children if child.type == "elif_clause")]
        for position, clause in enumerate(clauses, 1):
            at = next((at for at, child in enumerate(clause.children) if child.type == "then"), 0)
            tests = [child for child in clause.children[:at] if child.is_named and child.type != "comment"]
            result = test_result(tests[0], self._known_value) if len(tests) == 1 else None
            if result is not False:
                return position if result else None
        return len(clauses) + 1 if node.children[-2].type == "else_clause" else 0

    def _known_value(self, node: Node) -> str | None:
        """Return what a word of a test becomes, without noting that it is used."""
        if any(below(node, "command_substitution", "process_substitution")):
            return None
        if node.type in ("variable_name", "number") and (number := self._number(self._source(node))) is not None:
            return str(number)
        uses = len(self.script.uses)
        words = self._words(node, Context())
        del self.script.uses[uses:]
        return words[0].value if len(words) == 1 else None

    def _case(self, node: Node, context: Context) -> None:
        items = [item for item in node.children if item.type == "case_item"]
        patterns = [[self._source(value) for value in item.children_by_field_name("value")] for item in items]
        value = node.child_by_field_name("value")
        chosen = matching(patterns, self._known_value(value) if value is not None else None)
        bodies = []
        for item in items:
            values = item.children_by_field_name("value")
            bodies.append([child for child in item.children if child.is_named and child not in values])
        tests = self._source(value) if value is not None else ""
        is_whole = ["*"] in patterns
        self._branches(bodies, replace(context, is_conditional=True), whole=is_whole, chosen=chosen, tests=tests)

    def _branches(
        self, bodies: Sequence[Sequence[Node]], context: Context, *, whole: bool, chosen: int | None, tests: str
    ) -> None:
        """Walk over bodies of which one is run, or none; what they leave differently is not known afterwards.

        Args:
            bodies: the statements of each branch.
            context: what stands around them.
            whole: whether one of them is run for certain.
            chosen: which of them is run, counted from 1, 0 for none; None if that is not known.
            tests: what decides.
        """
        before, at = self.values, self._piece.at(bodies[0][0].start_byte) if bodies and bodies[0] else -1
        chosen = self.taken.get(at, chosen)
        outcomes = [before]
        goes_on = [not whole]
        for position, body in enumerate(bodies, 1):
            self.values = dict(before)
            is_run = chosen in (None, position) or not self.taken  # Where no outcome is taken, each branch is read.
            for child in body if is_run else ():
                if child.type not in _STATEMENTS_SKIPPED:
                    self._statement(child, context)
            outcomes.append(self.values)
            goes_on.append(not leaves(body, self._source))
        if chosen is not None and chosen < len(outcomes):
            self.values = outcomes[chosen]
            return
        possible = [position for position, is_possible in enumerate(goes_on) if is_possible]
        ends = [outcomes[position] for position in possible] or [before]
        names = {name for end in ends for name in end}
        same = {name for name in names if len({comparable(end.get(name)) for end in ends}) == 1}
        self.values = {name: ends[0].get(name) if name in same else None for name in names}
        if not context.loops and not context.function and not BY_NODES.search(tests):
            self._open_choices |= dict.fromkeys(names - same, Branch(at, tuple(possible)))

    def _loop(self, node: Node, context: Context, *, reads_input: bool = False) -> None:
        is_while = node.type == "while_statement"
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        name = self._source(variable) if variable is not None else ""
        values = list(node.children_by_field_name("value"))
        words = tuple(word for child in values for word in self._words(child, context))
        loop = Loop("while" if is_while else "for", name, words, reads_input, self._piece.at(node.start_byte))
        for condition in node.children_by_field_name("condition") if is_while else ():
            if condition.is_named:
                self._statement(condition, replace(context, is_condition=True))
        if node.type == "c_style_for_statement":
            name = next((self._source(child) for child in below(node, "variable_name")), "")
        if name:
            self._forget(name, loop.at, context)
        unknown = dict.fromkeys(self._assigned_in(body))
        self.values.update(unknown)
        if body is not None and "shift" in self._source(body):
            self.forget_arguments()
        if body is not None:
            self._block(body, replace(context, loops=(*context.loops, loop)))
            self.values.update(unknown)

    def _function(self, node: Node, context: Context) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if body is None or name is None:
            return
        # It may be called after what follows, so that what is set there too is not known in it.
        before, unknown = self.values, dict.fromkeys(self._assigned_in(body))
        self.forget_arguments()
        self.values |= self.run.arguments.get(self._source(name), {}) if self.run else {}
        self.values |= {key: None for key in before if key in unknown or self._last.get(key, 0) > node.end_byte}
        self._statement(body, replace(context, function=self._source(name)))
        self.values = {**before, **unknown}

    def _subshell(self, node: Node, context: Context) -> None:
        before = dict(self.values)
        self._block(node, context)
        self.values = before

    def _substitution(self, node: Node, context: Context) -> None:
        self._subshell(node, replace(context, is_substitution=True, pipe=(), background=None, chain=""))

    def _assigned_in(self, node: Node | None) -> set[str]:
        found = below(node, "variable_assignment") if node is not None else ()
        return {self._source(child.children[0]).partition("[")[0] for child in found}


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
    "test_command": Walker._expansions,
}
