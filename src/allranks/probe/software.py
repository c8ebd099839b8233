"""What a node would run: the packages of its interpreter, and the script. Nothing is imported.

To import torch takes a second, and a package that is imported may do anything.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from allranks.probe import sources
from allranks.probe.finding import Finder
from allranks.probe.order import Order
from allranks.probe.sources import Source

#: What torch says of its build, in a file that needs no import.
_VERSION = re.compile(r"^(?:__version__|cuda)\b[^=\n]*=\s*'([^']+)'", re.MULTILINE)


def torch(order: Order) -> dict[str, str | None] | None:
    """Return the versions of torch, and of the CUDA and NCCL that it was built with; None where there is no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    named = {match[0].split(":")[0].split("=")[0].strip(): match[1] for match in _VERSION.finditer(text)}
    return {"version": named.get("__version__"), "cuda": named.get("cuda"), "nccl": _nccl(Path(spec.origin).parents[1])}


def _nccl(packages: Path) -> str | None:
    """Return the version of the NCCL that is installed beside torch, as its wheels are."""
    found = sorted(packages.glob("nvidia_nccl_cu*.dist-info"))  # To ask importlib.metadata takes longer than all else.
    return found[-1].name.removesuffix(".dist-info").rpartition("-")[2] if found else None


def shared(order: Order) -> str | None:
    """Return the word in the file that all nodes must see; None where this one does not see it."""
    try:
        return Path(order.shared).read_text() if order.shared else None
    except OSError as error:
        return f"{error.strerror}: {order.shared}"


def files(order: Order) -> dict[str, str | None]:
    """Return, for each of the files that the job names, why it cannot be read; None: it can."""
    return {path: _why_unreadable(Path(path)) for path in order.files}


def _why_unreadable(path: Path) -> str | None:
    try:
        path.open("rb").close()
    except OSError as error:
        return error.strerror
    return None


def script(order: Order) -> dict[str, Any]:
    """Look at what the ranks run.

    Returns:
        ``error``: why it cannot be run; where it is Python, also what :func:`allranks.probe.sources.read` returns.
    """
    if order.kind == "binary":
        return {"error": None if shutil.which(order.target) else f"{order.target} is no program here or on PATH"}
    if order.kind == "script":
        return _script(Path(order.target))
    return _module(order.target) if order.kind else {"error": None}


def _script(target: Path) -> dict[str, Any]:
    path = target / "__main__.py" if target.is_dir() else target
    if not path.is_file():
        return {"error": f"there is no {target}"}
    if path.suffix != ".py":
        return {"error": None}
    folder = path.resolve().parent
    first = folder if target.is_dir() or not _is_safe() else None
    return sources.read(Finder(first, (folder, Path.cwd())), [Source(path, is_main=True)])


def _module(name: str) -> dict[str, Any]:
    first = None if _is_safe() else Path.cwd()
    finder = Finder(first, (Path.cwd(),))
    specs = finder.find(name, anywhere=True)
    if specs and specs[-1].submodule_search_locations:
        name = f"{name}.__main__"
        specs = finder.find(name, anywhere=True)
    if specs is None or len(specs) <= name.count("."):
        is_made = sources.may_make(finder, name)
        return {"error": None if is_made else f"there is no module {name.removesuffix('.__main__')}"}
    finder = Finder(first, (Path.cwd(), _folder(specs[0])))
    *packages, last = sources.sources_of(name, specs)
    if last.path.suffix != ".py":
        return {"error": None}
    own = [each for each in packages if finder.is_own(str(each.path))]
    return sources.read(finder, [*own, replace(last, is_main=True)])


def _folder(spec: ModuleSpec) -> Path:
    """Return the folder of a package, or the one that a module is in."""
    return Path(spec.origin).parent if spec.origin else Path(next(iter(spec.submodule_search_locations or ("",))))


def _is_safe() -> bool:
    """Tell whether the interpreter leaves the script's folder, or the working directory, out of its path: ``-P``."""
    return bool(sys.flags.isolated or getattr(sys.flags, "safe_path", False))
