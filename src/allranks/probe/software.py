"""What a node would run: the packages of its interpreter, and the script. Nothing is imported.

To import torch takes a second, and a package that is imported may do anything.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from allranks.probe import sources
from allranks.probe.order import Order

#: What torch says of its build, in a file that needs no import.
_VERSION = re.compile(r"^(?:__version__|cuda)\b[^=\n]*=\s*'([^']+)'", re.MULTILINE)

#: Packages that hold a module which is run are looked into, wherever they are.
_ANYWHERE = ("",)


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
        ``error``: why it cannot be run; ``digest`` of it and of the modules beside it that it imports; ``missing``: the
        imports that cannot be found, each with ``name``, ``file`` and ``line``; ``imports``: how many can.
    """
    if order.kind == "binary":
        return {"error": None if shutil.which(order.target) else f"{order.target} is no program here or on PATH"}
    if order.kind == "script":
        path = Path(order.target)
        if path.is_dir():
            path /= "__main__.py"
        sys.path[0] = str(path.parent)
        if not path.is_file():
            return {"error": f"there is no {order.target}"}
    else:
        found = sources.find(order.target, _ANYWHERE)
        if found and found.submodule_search_locations:
            found = sources.find(f"{order.target}.__main__", _ANYWHERE)
        if found is None:
            return {"error": f"there is no module {order.target}"}
        path = Path(found.origin or "")
    return sources.read(path) if path.suffix == ".py" else {"error": None}
