"""Plug-ins of other packages, by entry points."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from allranks.errors import AllranksError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints


def points(group: str) -> EntryPoints:
    """Return the entry points of a group; the first call reads the metadata of all installed packages."""
    found: EntryPoints = _all(tuple(sys.path)).select(group=group)
    return found


@cache
def _all(_: tuple[str, ...]) -> Any:
    """Return the entry points of all packages on a path. Cached: it takes 20 ms, and a run needs two groups."""
    from importlib.metadata import entry_points  # Imported here: it is slow, and rarely needed.

    return entry_points()


def load(point: EntryPoint, what: str) -> Any:
    """Load an entry point; ``what`` names it in errors, such as ``checks``; raise an AllranksError if that fails."""
    try:
        return point.load()
    except Exception as error:
        package = point.dist.name if point.dist else point.value
        raise AllranksError(
            f"the {what} of the package {package} cannot be loaded",
            why=f"{point.value}: {type(error).__name__}: {error}",
            fix=f"reinstall {package}, or remove it: {sys.executable} -m pip uninstall {package}",
        ) from error
