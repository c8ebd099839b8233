"""Which statements of a script are run, and what they leave known: lists, branches, loops and functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from allranks.lint.branches import BY_NODES, Branch, leaves, matching, test_result
from allranks.lint.expand import DEEPEST, Expander, below, comparable
from allranks.lint.model import Context, Loop, Script

if TYPE_CHECKING:
    from tree_sitter import Node

#: Nodes among the statements of a node that are none.
SKIPPED = {"comment", "heredoc_body", "\n", ";", ";;", "&", "&&", "||", "|", "|&"}
#: Commands that people expect to succeed: what follows ``&&`` after them is run.
_SURE = {"cd", "pushd", "mkdir", "source", ".", "ulimit", "umask", "unset", "export", "module", "ml", "conda", "sleep"}


class ControlFlow(Expander):
    """Walks over statements that contain others.

    Args:
        script: the model; comments and loops are added to it.
        known: variables that the scheduler sets, whose values follow from the directives.
    """

    def __init__(self, script: Script, known: dict[str, str]) -> None:
        super().__init__(script, known)
        self._last: dict[str, int] = {}  # Where each variable is assigned last in the text that is being walked over.
        #: Of branches, by where they start, the outcome that is taken to have happened.
        self.taken: dict[int, int] = {}
        self._open_choices: dict[str, Branch] = {}  # The branches that leave each variable with different values.

    def _statement(self, node: Node, context: Context) -> None:
        """Walk over a statement of any kind."""
        raise NotImplementedError

    def _forget(self, name: str, at: int, context: Context) -> None:
        """Note that a variable gets a value that is not known."""
        raise NotImplementedError

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
            if child.type in SKIPPED or not (child.is_named or child.type == "ERROR"):
                continue
            is_background = after is not None and after.type == "&"
            self._statement(child, replace(context, background=at) if is_background else context)
        self._depth -= 1

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
        before, at = self.values, next((self._piece.at(body[0].start_byte) for body in bodies if body), -1)
        chosen = self.taken.get(at, chosen)
        outcomes = [before]
        goes_on = [not whole]
        for position, body in enumerate(bodies, 1):
            self.values = dict(before)
            is_run = chosen in (None, position) or not self.taken  # Where no outcome is taken, each branch is read.
            inner = replace(context, branches=(*context.branches, (at, position)))
            for child in body if is_run else ():
                if child.type not in SKIPPED:
                    self._statement(child, inner)
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
        if node.type == "c_style_for_statement":
            name = next((self._source(child) for child in below(node, "variable_name")), "")
        values = list(node.children_by_field_name("value"))
        words = tuple(word for child in values for word in self._words(child, context))
        loop = Loop("while" if is_while else "for", name, words, reads_input, self._piece.at(node.start_byte))
        for condition in node.children_by_field_name("condition") if is_while else ():
            if condition.is_named:
                self._statement(condition, replace(context, is_condition=True))
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
