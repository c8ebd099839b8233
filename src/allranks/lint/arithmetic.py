"""The value of ``$(( … ))`` where all that stands in it is known."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_PLAIN = re.compile(r"[\d\s+\-*/%()]{1,200}")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: int(left / right),
    ast.Mod: operator.mod,
}


def evaluate(source: str, number_of: Callable[[str], int | None]) -> str | None:
    """Return the value of an expression of sums and products; None where it is another, or not known."""
    numbers = {name: number_of(name) for name in _NAME.findall(source)}
    if None in numbers.values():
        return None
    plain = _NAME.sub(lambda match: str(numbers[match[1]]), source)
    if not _PLAIN.fullmatch(plain) or "**" in plain or "//" in plain:
        return None
    try:
        return str(_value(ast.parse(plain.strip().replace("/", "//"), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError, OverflowError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(node)
