"""Which branch of a script is run, where what its tests compare is known."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tree_sitter import Node

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    **{"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le},
    **{"-gt": operator.gt, "-ge": operator.ge},
}
_IN_ARITHMETIC: dict[str, Callable[[int, int], bool]] = {
    **{"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le},
    **{">": operator.gt, ">=": operator.ge},
}
#: What decides by the nodes that a job has at last: the directives may rule out one of the branches.
BY_NODES = re.compile(r"node|host|rank|world|machine|slurm|pbs", re.IGNORECASE)
_GLOB = re.compile(r"[*?\[\]()|\\$`]")


class Branch(NamedTuple):
    """A place where a script goes on in one of several ways."""

    at: int  # Where the statements of its first branch start.
    outcomes: tuple[int, ...]  # The branches after which it goes on, counted from 1; 0: none of them is run.


def test_result(node: Node, value_of: Callable[[Node], str | None]) -> bool | None:
    """Return what ``[ … ]``, ``[[ … ]]`` or ``(( … ))`` yields; None if it is another command, or not known."""
    if node.type not in ("test_command", "compound_statement") or node.named_child_count != 1:
        return None
    is_arithmetic = node.children[0].type == "(("
    if node.type == "compound_statement" and not is_arithmetic:
        return None
    return _result(node.named_children[0], value_of, is_arithmetic=is_arithmetic)


def _result(node: Node, value_of: Callable[[Node], str | None], *, is_arithmetic: bool) -> bool | None:
    if node.type == "unary_expression" and node.children[0].type == "!":
        inner = _result(node.children[-1], value_of, is_arithmetic=is_arithmetic)
        return None if inner is None else not inner
    if node.type == "unary_expression" and node.child_count == 2 and not is_arithmetic:
        test, value = node.children[0].text, value_of(node.children[1])
        if value is None or test not in (b"-z", b"-n"):
            return None
        return (value == "") == (test == b"-z")
    if node.type != "binary_expression" or node.child_count != 3:
        return None
    sign = (node.children[1].text or b"").decode()
    left, right = value_of(node.children[0]), value_of(node.children[2])
    if left is None or right is None:
        return None
    numbers = _IN_ARITHMETIC if is_arithmetic else _NUMBERS
    if sign in numbers and left.isdecimal() and right.isdecimal() and len(left + right) < 20:
        return numbers[sign](int(left), int(right))
    if is_arithmetic or sign not in ("=", "==", "!=") or _GLOB.search(right):
        return None
    return (left == right) == (sign != "!=")


def matching(patterns: Sequence[Sequence[str]], value: str | None) -> int | None:
    """Return which item of ``case`` a value matches, counted from 1, 0 for none; None if that is not known."""
    if value is None:
        return None
    for position, alternatives in enumerate(patterns, 1):
        for pattern in alternatives:
            plain = pattern.strip("\"'")
            if plain == value or pattern == "*":
                return position
            if _GLOB.search(plain):
                return None
    return 0


def leaves(body: Sequence[Node], source: Callable[[Node], str]) -> bool:
    """Return whether a branch ends the script, so that nothing goes on after it."""
    statements = [child for child in body if child.is_named and child.type != "comment"]
    if len(statements) == 1 and statements[0].type in ("else_clause", "elif_clause"):
        return leaves(statements[0].children, source)
    return (
        bool(statements)
        and statements[-1].type == "command"
        and re.match(r"exit\b", source(statements[-1])) is not None
    )
