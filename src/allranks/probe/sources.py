"""A script and the modules beside it, read without running them: what they import, and whether that is there."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from typing import Any

from allranks.probe import statements
from allranks.probe.finding import Finder

#: As many files of the job's own are read.
_MOST_FILES = 500


@dataclass(frozen=True)
class Source:
    """A file to read.

    Attributes:
        path: the file.
        package: where its relative imports begin; empty: it has none.
        is_main: whether it is what the ranks run.
        is_sure: whether it is run in any case. Otherwise only its text counts: what it lacks need not be there.
    """

    path: Path
    package: str = ""
    is_main: bool = False
    is_sure: bool = True


def read(finder: Finder, first: Sequence[Source]) -> dict[str, Any]:
    """Read sources, and all sources of the job's own that they import.

    Returns:
        ``error``: why they cannot be run; ``digest`` of all that was read; ``missing``: the imports that cannot be
        found, each with ``name``, ``file``, ``line``, ``near``: a folder that has it, and is not looked at, and
        ``within``: the job's own package that lacks it; ``imports``: how many can be found; ``alters_path``: whether a
        source may alter where modules are found, so that what cannot be found here may be there when it runs.
    """
    reader = _Reader(finder)
    waiting, seen = [*first], set[Path]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The ranks themselves say them.
        while waiting and len(seen) < _MOST_FILES:
            source = waiting.pop()
            if source.path in seen or not source.path.is_file():
                continue
            seen.add(source.path)
            try:
                imported = [*reader.read(source)]
            except _NotPythonError as error:
                if source.is_sure:
                    return {"error": str(error)}
                continue
            # What is sure to be run comes first, lest it be taken for something that is not.
            waiting[:0] = [each for each in imported if not each.is_sure]
            waiting += [each for each in reversed(imported) if each.is_sure]
    return reader.told()


@dataclass
class _Reader:
    finder: Finder
    missing: list[dict[str, Any]] = field(default_factory=list)
    found: set[str] = field(default_factory=set)
    alters_path: bool = False
    digest: Any = field(default_factory=hashlib.sha256)

    def told(self) -> dict[str, Any]:
        """Return what has been found out so far."""
        told = {"missing": self.missing, "imports": len(self.found), "alters_path": self.alters_path}
        return {"error": None, "digest": self.digest.hexdigest(), **told}

    def read(self, source: Source) -> Iterator[Source]:
        """Read one source; yield the job's own that it imports."""
        text = source.path.read_bytes()
        self.digest.update(text)
        tree = _parsed(text, source.path)
        self.alters_path = self.alters_path or statements.alter_path(tree)
        for each in statements.imports(tree.body, source.package, is_main=source.is_main):
            specs = self.finder.find(each.module)
            if specs is not None:
                yield from self._found(each, specs, source)
                continue
            packages = self.finder.packages(each.module)
            yield from self._own(each.module, packages, source.is_sure)
            if source.is_sure:
                self.missing.append(self._lacking(each, packages, source))

    def _found(self, each: statements.Imported, specs: Sequence[ModuleSpec], source: Source) -> Iterator[Source]:
        if source.is_sure:
            self.found.add(each.module)
        yield from self._own(each.module, specs, source.is_sure)
        if not specs[-1].submodule_search_locations or not self.finder.has_own(specs[-1]):
            return
        for name in each.names:  # It may be a module, or anything else that the package has.
            inner = f"{each.module}.{name}"
            if within := self.finder.find(inner):
                is_sure = source.is_sure and not _may_have(specs[-1], name, each.module)
                yield from self._own(inner, within, is_sure)

    def _own(self, name: str, specs: Sequence[ModuleSpec], is_sure: bool) -> Iterator[Source]:
        """Yield the sources of the job's own among a module and its packages."""
        return (
            each
            for each in sources_of(name, specs, is_sure)
            if each.path.suffix == ".py" and self.finder.is_own(str(each.path))
        )

    def _lacking(self, each: statements.Imported, packages: Sequence[ModuleSpec], source: Source) -> dict[str, Any]:
        is_own = bool(packages) and self.finder.has_own(packages[-1])
        within = next(iter(packages[-1].submodule_search_locations or ()), None) if is_own else None
        near = None if packages else _near(each.module.partition(".")[0], source.path)
        return {"name": each.module, "file": str(source.path), "line": each.line, "near": near, "within": within}


def _near(name: str, importer: Path) -> str | None:
    """Return a folder of the job's that has a module of that name, and where an import does not find it."""
    folders = (Path.cwd(), *importer.parents[:2])
    return next((str(each) for each in folders if (each / f"{name}.py").is_file() or _holds_python(each / name)), None)


def _holds_python(folder: Path) -> bool:
    """Tell whether a folder has Python in it; one that holds data may have very many files."""
    if not folder.is_dir():
        return False
    with os.scandir(folder) as files:
        return any(each.name.endswith(".py") for each in islice(files, 1000))


def sources_of(name: str, specs: Sequence[ModuleSpec], is_sure: bool = True) -> Iterator[Source]:
    """Yield the files of a module and of the packages that it is in, which are run before it."""
    parts = name.split(".")
    for depth, spec in enumerate(specs, 1):
        package = parts[:depth] if spec.submodule_search_locations else parts[: depth - 1]
        yield Source(Path(spec.origin or ""), ".".join(package), is_sure=is_sure)


def may_make(finder: Finder, name: str) -> bool:
    """Tell whether a package may have a module that cannot be found in it, since it alters where modules are found."""
    specs = finder.packages(name, anywhere=True)
    files = [Path(spec.origin) for spec in specs if spec.origin and spec.origin.endswith(".py")]
    return any(statements.alter_path(_of(path)) for path in files)


def _may_have(package: ModuleSpec, name: str, its_name: str) -> bool:
    """Tell whether a package may have that name without a module of it: that is not imported then."""
    path = Path(package.origin or "")
    return path.suffix == ".py" and statements.may_bind(_of(path), name, its_name)


@cache
def _of(path: Path) -> ast.Module:
    """Read a package's ``__init__``, of which each name that is taken from it is asked."""
    return _parsed(path.read_bytes(), path)


class _NotPythonError(Exception):
    """A source cannot be read as Python."""


def _parsed(text: bytes, path: Path) -> ast.Module:
    try:
        return ast.parse(text, str(path))
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise _NotPythonError(f"{path}{line} is no Python {version}: {said}") from error
