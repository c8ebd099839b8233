"""What a node would run: torch, the script, and what the script imports. Nothing is imported for that.

To import torch takes a second, and a package that is imported may do anything.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from itertools import islice
from pathlib import Path
from typing import Any

from allranks.checks.collect.gather import ProbeRequest

#: What torch says of its build, in a file that needs no import.
_VERSION = re.compile(r"^(?:__version__|cuda)\b[^=\n]*=\s*'([^']+)'", re.MULTILINE)
#: In a source: modules may be found elsewhere when it runs, or are made by it.
_ALTERS_PATH = re.compile(
    rb"\bsys\s*\.\s*(path|modules|meta_path|path_hooks)\b|\bfrom\s+sys\s+import\b|\b(addsitedir|extend_path|__path__"
    rb"|setup_root|set_root|autosetup|autoroot|autorootcwd|rootutils|pyximport|cppimport)\b"
)
#: What all ranks have to call: of a context, and of what its checkpoints() returns.
_OF_CONTEXT, _OF_CHECKPOINTS = ("barrier", "sum", "on_main", "checkpoints", "metrics.means"), ("save", "step")
#: As many files of the job's own are read.
_MOST_FILES = 500
#: As many entries of a directory are searched for Python: one of data may have millions.
_MOST_ENTRIES = 1000
#: How a path starts that leads to the copy of this program on the node: the job has none.
_COPY = "/proc/self/fd/"


def torch(request: ProbeRequest) -> dict[str, str | None] | None:
    """Return the versions of torch, and of the CUDA and NCCL that it was built with; None where there is no torch."""
    spec = _find("torch", sys.path)
    if spec is None or not spec.origin:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    named = {match[0].split(":")[0].split("=")[0].strip(): match[1] for match in _VERSION.finditer(text)}
    # NCCL is beside torch, where its wheels put it. To ask importlib.metadata takes longer than all else.
    wheels = sorted(Path(spec.origin).parents[1].glob("nvidia_nccl_cu*.dist-info"))
    nccl = wheels[-1].name.removesuffix(".dist-info").rpartition("-")[2] if wheels else None
    return {"version": named.get("__version__"), "cuda": named.get("cuda"), "nccl": nccl}


def shared(request: ProbeRequest) -> str | None:
    """Return the word in the file that all nodes must see, or why it cannot be read; None where there is none."""
    try:
        return Path(request.shared).read_text() if request.shared else None
    except OSError as error:
        return f"{error.strerror}: {request.shared}"


def files(request: ProbeRequest) -> dict[str, str | None]:
    """Return, for each of the files that the job names, why it cannot be read; None: it can."""
    found: dict[str, str | None] = {}
    for path in request.files:
        found[path] = None
        try:
            Path(path).open("rb").close()
        except OSError as error:
            found[path] = error.strerror
    return found


def script(request: ProbeRequest) -> dict[str, Any]:
    """Read what the ranks run, and the job's own modules that it imports.

    Returns:
        ``error``: why it cannot be run, and ``is_there`` if it is no Python; else what :func:`_read` returns.
    """
    if request.kind == "binary":
        return {"error": None if shutil.which(request.target) else f"{request.target} is not a program here or on PATH"}
    if not request.kind:
        return {"error": None}
    path = [entry for entry in sys.path if not entry.startswith(_COPY)]
    # Whether the interpreter leaves the script's directory, or the working directory, out of its path: -P.
    is_safe = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    if request.kind == "module":
        path = path if is_safe else [str(Path.cwd()), *path]
        return _module(request.target, path)
    target = Path(request.target)
    file = target / "__main__.py" if target.is_dir() else target
    if not file.is_file():
        return {"error": f"there is no {target}"}
    if file.suffix != ".py":
        return {"error": None}
    folder = file.resolve().parent
    path = path if is_safe and file == target else [str(folder), *path]
    return _read([file], path, (folder, Path.cwd()))


def _module(name: str, path: list[str]) -> dict[str, Any]:
    """Find a module as ``python -m`` does, and read it with the packages that it is in."""
    first, *parts = name.split(".")
    found = [_find(first, path)]
    for part in [*parts, "__main__"]:
        places = found[-1] and found[-1].submodule_search_locations
        if part == "__main__" and found[-1] and not places:
            break  # It is not a package, and is run itself.
        found.append(PathFinder.find_spec(part, [*places]) if places else None)
    sources = [Path(spec.origin) for spec in found if spec and spec.origin]
    if found[-1] is None:
        may_exist = any(_ALTERS_PATH.search(each.read_bytes()) for each in sources if each.suffix == ".py")
        return {"error": None if may_exist else f"there is no module {name}"}
    if sources[-1].suffix != ".py":
        return {"error": None}
    folders = (Path.cwd(), sources[0].parent)
    return _read([*(each for each in sources[:-1] if _is_own(str(each), folders)), sources[-1]], path, folders)


def _read(first: Sequence[Path], path: list[str], folders: Sequence[Path]) -> dict[str, Any]:
    """Read sources that run in any case, and all below ``folders`` that they may import, as found on ``path``.

    Returns:
        ``error``: why they cannot be run; ``digest`` of all that was read; ``missing``: what is imported in any case
        and cannot be found, each with ``name``, ``file``, ``line``, ``near``: a directory of the job that has it and
        is not on the path; ``imports``: how many can be found; ``alters_path``: whether a source may alter where
        modules are found, so that what cannot be found here may be there when it runs; ``lone``: calls that all ranks
        have to make and rank 0 makes alone, each with ``call``, ``file`` and ``line``.
    """
    digest, found, missing, alters_path, lone = hashlib.sha256(), set[str](), [], False, list[dict[str, Any]]()
    own_path = [Path(entry) for entry in path if _is_own(f"{entry}/", folders)]
    waiting, seen = deque((file, True) for file in first), set[Path]()
    while waiting and len(seen) < _MOST_FILES:
        file, is_certain = waiting.popleft()
        if file in seen:
            continue
        seen.add(file)
        text = file.read_bytes()
        digest.update(text)
        alters_path = alters_path or bool(_ALTERS_PATH.search(text))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # The ranks themselves show them.
                tree = ast.parse(text, str(file))
        except (SyntaxError, ValueError) as error:
            if is_certain:
                return {"error": _why_no_python(file, error), "is_there": True}
            continue
        if b"allranks" in text:
            lone += [{"call": call, "file": str(file), "line": line} for line, call in sorted({*_made_by_rank_0(tree)})]
        for line, level, name, is_run in _imports(tree, is_certain):
            if is_run and not level:
                top = name.partition(".")[0]
                if _find(top, path):
                    found.add(name)
                else:
                    missing.append({"name": name, "file": str(file), "line": line, "near": _near(top, file)})
            bases = file.parents[level - 1 : level] if level else own_path
            for source in next(filter(None, ([*_sources(base, name)] for base in bases)), []):
                # What runs in any case comes first, lest it be taken for something that does not.
                (waiting.appendleft if is_run else waiting.append)((source, is_run))
    more = {"missing": missing, "imports": len(found), "alters_path": alters_path, "lone": lone}
    return {"error": None, "digest": digest.hexdigest(), **more}


def _imports(tree: ast.Module, is_certain: bool) -> Iterator[tuple[int, int, str, bool]]:
    """Yield line, level and name of all that a source imports, and whether that is a module that it needs to run.

    What is imported from a package may be a module, or a name in one; what stands in a block may not be run.
    """
    in_any_case = set(tree.body) if is_certain else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, 0, alias.name, node in in_any_case
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                yield node.lineno, node.level, node.module, node in in_any_case
            prefix = f"{node.module}." if node.module else ""
            for alias in node.names:
                yield node.lineno, node.level, prefix + alias.name, False


def _made_by_rank_0(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each call that all ranks have to make, in a block that only rank 0 runs."""
    savers = [
        ast.unparse(node.targets[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).endswith(".checkpoints")
    ]
    for block in ast.walk(tree):
        if not isinstance(block, ast.If) or block.orelse or not (ctx := _asks_for_rank_0(block.test)):
            continue
        calls = {f"{ctx}.{name}" for name in _OF_CONTEXT}
        calls |= {f"{saver}.{name}" for saver in savers for name in _OF_CHECKPOINTS}
        for node in ast.walk(block):
            if isinstance(node, ast.Call) and (call := ast.unparse(node.func)) in calls:
                yield node.lineno, f"{call}()"


def _asks_for_rank_0(test: ast.expr) -> str:
    """Return the context that a condition asks whether this is rank 0; empty if it is another condition."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return next(filter(None, map(_asks_for_rank_0, test.values)), "")
    text = ast.unparse(test)
    return next((text[: -len(end)] for end in (".is_main", ".rank == 0") if text.endswith(end)), "")


def _sources(base: Path, name: str) -> Iterator[Path]:
    """Yield the files below a directory that an import of a module runs: those of its packages, and its own."""
    for part in name.split("."):
        base /= part
        for file in (base / "__init__.py", base.with_name(f"{part}.py")):
            if file.is_file():
                yield file
                break


def _find(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Find a module that is in no package, or in one with that path, as ``import`` would."""
    if name == "allranks":  # A run carries a copy: its scripts always have it.
        return ModuleSpec(name, None)
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path if finder is PathFinder else None)
        if spec and not (spec.origin or "").startswith(_COPY):
            return spec
    return None


def _is_own(path: str, folders: Sequence[Path]) -> bool:
    """Return True if a path is the job's own, and was not installed below its directories, with Python or later."""
    own = tuple(f"{folder}/" for folder in folders)  # None is /: no path starts with two slashes.
    environments = [f"{folder}/" for folder in (sys.prefix, sys.base_prefix) if f"{folder}/" not in own]
    python = (f"{Path(os.__file__).parent}/", *(each for each in environments if each.startswith(own)))
    is_installed = path.startswith(python) or "/site-packages/" in path or "/dist-packages/" in path
    return path.startswith(own) and not is_installed


def _near(name: str, importer: Path) -> str | None:
    """Return a directory of the job that has a module of that name, where an import does not find it."""
    for folder in (Path.cwd(), *importer.parents[:2]):
        if (folder / f"{name}.py").is_file():
            return str(folder)
        with suppress(OSError), os.scandir(folder / name) as entries:
            if any(entry.name.endswith(".py") for entry in islice(entries, _MOST_ENTRIES)):
                return str(folder)
    return None


def _why_no_python(file: Path, error: SyntaxError | ValueError) -> str:
    line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
    said = error.msg if isinstance(error, SyntaxError) else error
    return f"{file}{line} is not valid Python {sys.version_info[0]}.{sys.version_info[1]}: {said}"
