"""A script and the modules beside it, read without running them: what they import, and whether that is there."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

#: As many files of the job's own are read.
_MOST_FILES = 500


def read(first: Path) -> dict[str, Any]:
    """Read a source, and all sources of the job's own that it imports.

    Returns:
        ``error``: why it cannot be run; ``digest`` of all that was read; ``missing``: the imports that cannot be found,
        each with ``name``, ``file`` and ``line``; ``imports``: how many can; ``alters_path``: whether a source names
        ``sys.path``, so that what cannot be found here may be found when it runs.
    """
    own = (f"{first.parent}/", f"{Path.cwd()}/")
    waiting, seen = [first], {first}
    missing: list[dict[str, Any]] = []
    found, digest, alters_path = set[str](), hashlib.sha256(), False
    while waiting and len(seen) < _MOST_FILES:
        path = waiting.pop()
        source = path.read_bytes()
        digest.update(source)
        try:
            tree = ast.parse(source, str(path))
        except (SyntaxError, ValueError) as error:
            return {"error": _not_python(path, error)}
        alters_path = alters_path or any(map(_is_path, ast.walk(tree)))
        for name, line in _imports(tree.body):
            spec = find(name, own)
            if spec is None:
                missing.append({"name": name, "file": str(path), "line": line})
                continue
            found.add(name)
            origin = Path(spec.origin or "")
            if _is_own(origin, own) and origin not in seen:
                seen.add(origin)
                waiting.append(origin)
    told = {"missing": missing, "imports": len(found), "alters_path": alters_path}
    return {"error": None, "digest": digest.hexdigest(), **told}


def find(name: str, own: Sequence[str]) -> ModuleSpec | None:
    """Find a module without importing the packages that it is in.

    What is in a package of somebody else's is taken to be there if the package is: many make modules as they run.

    Args:
        name: the module.
        own: folders whose packages are the job's own, with a slash behind each.
    """
    first, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ValueError, ImportError):  # Something that runs already has that name.
        return ModuleSpec(first, None)
    inner = first
    for part in rest:
        if spec is None or not spec.submodule_search_locations or not (spec.origin or "").startswith(tuple(own)):
            break
        inner = f"{inner}.{part}"
        spec = PathFinder.find_spec(inner, spec.submodule_search_locations)
    return spec


def _is_own(path: Path, own: Sequence[str]) -> bool:
    is_installed = "site-packages" in path.parts or "dist-packages" in path.parts
    return path.suffix == ".py" and str(path).startswith(tuple(own)) and not is_installed


def _imports(body: Sequence[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Yield the modules that are imported in any case, with the line: not what is tried, nor left to a function."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from ((alias.name, statement.lineno) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module, statement.lineno
        elif isinstance(statement, ast.With) or (isinstance(statement, ast.If) and _is_main(statement.test)):
            yield from _imports(statement.body)


def _is_path(node: ast.AST) -> bool:
    """Tell whether a piece of source is ``sys.path``, or another way to have modules found elsewhere."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("meta_path", "path_hooks", "addsitedir") or ast.unparse(node) == "sys.path"
    return False


def _is_main(test: ast.expr) -> bool:
    """Tell whether a condition is ``__name__ == "__main__"``."""
    return isinstance(test, ast.Compare) and ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _not_python(path: Path, error: Exception) -> str:
    line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{path}{line} is no Python {sys.version_info[0]}.{sys.version_info[1]}: {said}"
