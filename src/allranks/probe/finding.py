"""Finds modules where the ranks would, without importing any; and knows which are the job's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

#: How the origin of a module begins that came with this program (``allranks.preflight.program``): the job has none.
_SENT = "sent/"


class Finder:
    """What ``import`` would find.

    Args:
        first: the folder that comes before all others; None: none does.
        own: the job's own folders. What was installed below them, with Python or later, is not its own.
    """

    def __init__(self, first: Path | None, own: Sequence[Path]) -> None:
        self._path = [*([str(first)] if first else []), *sys.path]
        # Where the working directory is /, whatever is below it is not the job's: no path begins with two slashes.
        self._own = tuple(f"{folder}/" for folder in own)
        self._python = (f"{Path(os.__file__).parent}/", *_environments_below(self._own))

    def is_own(self, path: str) -> bool:
        """Tell whether a file or folder is the job's own."""
        is_installed = path.startswith(self._python) or "/site-packages/" in path or "/dist-packages/" in path
        return path.startswith(self._own) and not is_installed

    def has_own(self, spec: ModuleSpec) -> bool:
        """Tell whether a module is the job's own; a package without ``__init__``: whether all its folders are."""
        if spec.origin:
            return self.is_own(spec.origin)
        folders = [*(spec.submodule_search_locations or ())]
        return bool(folders) and all(self.is_own(f"{folder}/") for folder in folders)

    def find(self, name: str, *, anywhere: bool = False) -> list[ModuleSpec] | None:
        """Find a module without importing the packages that it is in.

        What is in a package of somebody else's is taken to be there if the package is: many make modules as they run.

        Args:
            name: the module.
            anywhere: whether to look into others' packages too.

        Returns:
            The packages that it is in, from the outermost on, and itself; it ends with a package of somebody else's.
            None: it is not there.
        """
        found: list[ModuleSpec] = []
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            spec = self._ask(".".join(parts[:depth]), found[-1].submodule_search_locations if found else None)
            if spec is None:
                return None
            found.append(spec)
            if not spec.submodule_search_locations or not (anywhere or self.has_own(spec)):
                break
        return found

    def packages(self, name: str, *, anywhere: bool = False) -> list[ModuleSpec]:
        """Return the packages, from the outermost on, that a module which is not there should be in, and that are."""
        while name := name.rpartition(".")[0]:
            if found := self.find(name, anywhere=anywhere):
                return found
        return []

    def _ask(self, name: str, folders: Sequence[str] | None) -> ModuleSpec | None:
        # A run carries a copy of allranks: its scripts always have it.
        specs = iter([ModuleSpec("allranks", None)]) if name == "allranks" else self._answers(name, folders)
        return next((spec for spec in specs if spec and not (spec.origin or "").startswith(_SENT)), None)

    def _answers(self, name: str, folders: Sequence[str] | None) -> Iterator[ModuleSpec | None]:
        if (module := sys.modules.get(name)) is not None:
            yield getattr(module, "__spec__", None) or ModuleSpec(name, None)
        last = name.rpartition(".")[2]  # By its whole name, a plain folder takes its package to have been imported.
        for finder in sys.meta_path:
            is_by_path = finder is PathFinder
            places = self._path if is_by_path and folders is None else folders
            yield finder.find_spec(last if is_by_path else name, places)


def _environments_below(own: Sequence[str]) -> list[str]:
    """Return the environments of Python's that lie in folders of the job's."""
    environments = {f"{folder}/" for folder in (sys.prefix, sys.base_prefix)}
    return [folder for folder in environments if folder not in own and folder.startswith(tuple(own))]
