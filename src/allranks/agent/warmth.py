"""Whether the ranks of a job may be forked from a process that has imported torch, and if not, why."""

from __future__ import annotations

import os
import re
import sys
import tokenize
from pathlib import Path

from allranks.agent.system import thread_count
from allranks.contract import NodeSpec

#: Variables that torch and the libraries under it read once, while they are imported or soon after.
_EARLY = r"(?:OMP|MKL|KMP|GOMP|OPENBLAS|ATEN|PYTORCH|TORCH(?!ELASTIC|_NCCL)|LD|PYTHON|MALLOC)_?\w*"
_SETS_EARLY_VARIABLE = re.compile(
    rf"""environ \s* \[ \s* ['"] (?P<item>{_EARLY}) ['"] \s* \] \s* = (?!=)
       | (?: environ\.setdefault | putenv ) \( \s* ['"] (?P<call>{_EARLY}) ['"]
       | environ (?: \.update \( | \s* \|= ) [^)}}]*? \b (?P<update>{_EARLY}) ['"]? \s* [:=] (?!=)""",
    re.VERBOSE,
)


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
    return _why_script_needs_plain(node)


def _why_script_needs_plain(node: NodeSpec) -> str | None:
    if node.kind != "script":
        return None
    path = Path(node.target)
    if path.is_dir() or path.suffix in (".pyz", ".pyc", ".zip"):
        return f"{path.name} is no plain source file"
    source = _read(path)
    if source is None:
        return f"{path.name} cannot be read as Python source"
    if match := _SETS_EARLY_VARIABLE.search(source):
        return f"{path.name} sets {match[match.lastgroup or 0]}, which is read while torch is imported"
    return None


def _read(path: Path) -> str | None:
    """Return a script's text; None if the interpreter would refuse to read it."""
    try:
        with tokenize.open(path) as stream:
            source = stream.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    return None if "\0" in source else source


def why_unsafe_to_fork() -> str | None:
    """Return why this process, which has imported torch, must not fork ranks; None if it may.

    A thread would vanish in the child with whatever lock it holds. OpenBLAS keeps threads but stops them
    itself before any fork, so one fork is tried before they are counted.
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
