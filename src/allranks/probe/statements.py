"""What the statements of a source import in any case, and whether they alter where modules are found."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

#: What makes a ``with`` that lets an ImportError through; others may catch it, as contextlib.suppress does.
_LETS_THROUGH = {"catch_warnings", "open", "nullcontext", "redirect_stdout", "redirect_stderr"}
#: Names by which modules are found elsewhere; ``setup_root`` and its like are those of rootutils.
_ALTERS = {"meta_path", "path_hooks", "addsitedir", "extend_path", "__path__", "setup_root", "set_root", "autosetup"}
#: Modules that alter it as they are imported, or once they are installed.
_ALTERING = {"autoroot", "autorootcwd", "cppimport", "hy", "pyximport"}
#: By these a module can get names that are not written in it.
_BINDS_ANY = {"globals", "vars", "setattr", "exec"}


class Imported(NamedTuple):
    """An import: the module, its line, and what is taken from the module."""

    module: str
    line: int
    names: tuple[str, ...] = ()


def imports(body: Sequence[ast.stmt], package: str = "", *, is_main: bool = False) -> Iterator[Imported]:
    """Yield what is imported in any case: not what is tried, nor left to a function.

    Args:
        body: the statements.
        package: where relative imports begin; empty: they are left out.
        is_main: whether the source is what the ranks run, so that ``__name__`` is ``"__main__"``.
    """
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (Imported(alias.name, statement.lineno) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            if module := _absolute(statement, package):
                yield Imported(module, statement.lineno, tuple(alias.name for alias in statement.names))
        elif (isinstance(statement, ast.With) and all(map(_lets_through, statement.items))) or (
            is_main and isinstance(statement, ast.If) and _is_main(statement.test)
        ):
            yield from imports(statement.body, package, is_main=is_main)


def alter_path(tree: ast.AST) -> bool:
    """Tell whether a source names ``sys.path``, or another way to have modules found elsewhere."""
    return any(map(_alters, ast.walk(tree)))


def may_bind(tree: ast.AST, name: str, package: str) -> bool:
    """Tell whether a package may have a name for anything but the module of that name in it.

    Args:
        tree: its ``__init__``.
        name: the name.
        package: its own name.
    """
    return any(_may_bind(node, name, package) for node in ast.walk(tree))


def _may_bind(node: ast.AST, name: str, package: str) -> bool:
    if isinstance(node, ast.ImportFrom):
        is_module = _absolute(node, package) == package
        named = {alias.asname or alias.name for alias in node.names if not (is_module and alias.name == name)}
        return name in named or "*" in named
    if isinstance(node, ast.Import):
        return any((alias.asname or alias.name.partition(".")[0]) == name for alias in node.names)
    if isinstance(node, ast.Name):
        return node.id in _BINDS_ANY or (node.id == name and isinstance(node.ctx, ast.Store))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
        return node.name in (name, "__getattr__")
    return False


def _alters(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        is_of_sys = node.attr in ("path", "modules") and ast.unparse(node.value).endswith("sys")
        return is_of_sys or node.attr in _ALTERS
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in _ALTERING for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        is_of_sys = node.module == "sys" and any(alias.name in ("path", "modules") for alias in node.names)
        return is_of_sys or (node.module or "").partition(".")[0] in _ALTERING
    return isinstance(node, ast.Name) and node.id in _ALTERS


def _absolute(statement: ast.ImportFrom, package: str) -> str | None:
    """Return the module that is imported from; None: it cannot be told."""
    if not statement.level:
        return statement.module
    parts = package.split(".") if package else []
    if statement.level > len(parts):
        return None
    base = parts[: len(parts) - statement.level + 1]
    return ".".join([*base, statement.module] if statement.module else base)


def _lets_through(item: ast.withitem) -> bool:
    made = item.context_expr
    return isinstance(made, ast.Call) and ast.unparse(made.func).rpartition(".")[2] in _LETS_THROUGH


def _is_main(test: ast.expr) -> bool:
    """Tell whether a condition is ``__name__ == "__main__"``."""
    return isinstance(test, ast.Compare) and ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")
