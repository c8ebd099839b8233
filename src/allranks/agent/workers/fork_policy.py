"""Decides how ranks start: whether they need torch, and whether they may be forked from a process with torch."""

from __future__ import annotations

import ast
import os
import re
import sys
import tokenize
import warnings
from pathlib import Path

from allranks.record.spec import NodeSpec
from allranks.system.processes import thread_count

#: Variables that torch and the libraries under it read once, while they are imported or soon after.
_EARLY = r"(?:OMP|MKL|KMP|GOMP|OPENBLAS|ATEN|PYTORCH|TORCH(?!ELASTIC|_NCCL)|LD|PYTHON|MALLOC)_?\w*"
_SETS_EARLY_VARIABLE = re.compile(
    rf"""environ \s* \[ \s* ['"] (?P<item>{_EARLY}) ['"] \s* \] \s* = (?!=)
       | (?: environ\.setdefault | putenv ) \( \s* ['"] (?P<call>{_EARLY}) ['"]
       | environ (?: \.update \( | \s* \|= ) [^)}}]*? \b (?P<update>{_EARLY}) ['"]? \s* [:=] (?!=)""",
    re.VERBOSE,
)
#: If one of these devices exists, ranks may use a GPU.
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
#: A script that contains one of these names may run any other code.
_RUNS_ANYTHING = frozenset({"importlib", "imp", "pkgutil", "runpy", "zipimport", "__import__", "exec", "eval"})

#: Lightning decides by its arguments whether to form a process group.
_LIGHTNING = re.compile(r"^\s*(?:import|from)\s+(?:pytorch_)?lightning\b", re.MULTILINE)


def needs_torch(node: NodeSpec) -> bool:
    """Return whether the job's ranks probably import torch: not if their code uses only the standard library.

    If that is wrong, each rank imports torch itself, and the agent does so once a rank connects to the store.
    """
    if node.kind != "script":
        return node.kind != "binary"
    source = _read(node.target)
    if source is None or "torch" in source:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The rank prints them.
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    used: set[str] = set()
    for part in ast.walk(tree):
        if isinstance(part, ast.Import):
            used.update(name.name.partition(".")[0] for name in part.names)
        elif isinstance(part, ast.ImportFrom):
            used.add("." if part.level else str(part.module).partition(".")[0])
        elif isinstance(part, ast.Name) and part.id in _RUNS_ANYTHING:
            return True
    return not used <= sys.stdlib_module_names - _RUNS_ANYTHING


def group_advice(node: NodeSpec) -> str | None:
    """Return how the job's script should form a process group; None if its text does not show that it uses torch.

    The text is read because a rank forked from a process with torch shows no trace of importing it.
    """
    source = _read(node.target) if node.kind == "script" else None
    if source is None:
        return None
    if _LIGHTNING.search(source):
        return 'write Trainer(devices=N, strategy="ddp"), with N the ranks of a node'
    return "write allranks.init() or torch.distributed.init_process_group()" if "torch" in source else None


def makes_optimizers(node: NodeSpec) -> bool:
    """Return whether the ranks probably create an optimizer, and may be forked with torch._dynamo imported.

    The first optimizer of a process imports torch._dynamo: 820 modules with torch 2.13, which take as long as torch
    itself. The import was seen to query no device and start no thread, but not yet on a machine with a GPU.
    """
    if node.kind != "script" or any(device.exists() for device in _GPU_DEVICES):
        return False
    return "optim" in (_read(node.target) or "")


def why_plain(node: NodeSpec) -> str | None:
    """Return why this job's ranks must start as plain interpreters, or None if they may be forked."""
    if node.kind == "binary":
        return "the job runs a program, not Python"
    if not node.warm:
        return "launch.warm is false"
    if node.python_options:
        return f"the interpreter has options: {' '.join(node.python_options)}"
    for variable in ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"):
        if os.environ.get(variable):
            return f"{variable} is set: coverage starts with the interpreter"
    if node.kind != "script":
        return None
    path = Path(node.target)
    if path.is_dir() or path.suffix in (".pyz", ".pyc", ".zip"):
        return f"{path.name} is not a plain source file"
    source = _read(node.target)
    if source is None:
        return f"{path.name} cannot be read as Python source"
    if match := _SETS_EARLY_VARIABLE.search(source):
        return f"{path.name} sets {match[match.lastgroup or 0]}, which is read while torch is imported"
    return None


def _read(path: str) -> str | None:
    """Return a script's text; None if the interpreter could not decode it."""
    try:
        with tokenize.open(path) as stream:
            source = stream.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    return None if "\0" in source else source


def why_unsafe_to_fork() -> str | None:
    """Return why this process, which has imported torch, must not fork ranks; None if it may.

    A thread does not exist in the child, but a lock that it holds stays locked there. OpenBLAS stops its threads before
    a fork, so this function forks once before it counts threads.
    """
    if sys.modules["torch"].cuda.is_initialized():
        return "CUDA was initialized while torch was imported"
    if thread_count() > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    if (count := thread_count()) > 1:
        return f"importing torch left {count - 1} threads running"
    return None
