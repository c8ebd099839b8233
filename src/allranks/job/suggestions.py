"""What to write in place of a value that breaks a rule of its type."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from allranks.contract import is_secret
from allranks.job.sources import ValueSource
from allranks.job.spec import Section
from allranks.job.values import as_name

#: Numbers to write where the default is none, or 0.
_NUMBERS = {"launch.master_port": "29500", "launch.max_restarts": "3", "resources.cpus_per_node": "8"}
_NUMBER = "1"


def write(path: str, source: ValueSource, text: str) -> str:
    """Return how a value is given where the wrong one was: ``--max-restarts 3``, or ``write max_restarts: 3``."""
    if source.kind == "flag":
        return f"{source.where} {shlex.quote(text)}"
    if source.kind == "environment":
        return f"{source.where}={shlex.quote(text)}"
    return f"write {path.rpartition('.')[2]}: {text}"


def for_choice(model: type[Section], path: str, source: ValueSource, choices: Sequence[str]) -> str:
    """Return what to write in place of a word that none of the choices is like."""
    default = _default(model, path)
    if default is None:
        return "leave it out: allranks then chooses"
    return f"leave it out, or {write(path, source, default if default in choices else choices[0])}"


def for_list(model: type[Section], path: str, source: ValueSource) -> str:
    """Return what to write where a list is needed: its default, or how one looks."""
    return write(path, source, f"[{', '.join(_default(model, path) or ('ONE', 'TWO'))}]")


def for_number(model: type[Section], path: str, source: ValueSource) -> str:
    """Return what to write where a number is needed: its default, or one that is usual."""
    default = _default(model, path)
    return write(path, source, _NUMBERS.get(path) or (f"{default:g}" if default else _NUMBER))


def for_gpus(source: ValueSource, kind: str, number: str) -> str:
    """Return what to write for Slurm's ``a100:4``, which is two values here."""
    if source.kind == "flag":
        return f"{source.where} {number} --gpu-type {kind}"
    return f"write gpus_per_node: {number} and gpu_type: {kind}"


def for_truth(model: type[Section], path: str, source: ValueSource) -> str:
    """Return what to write where true or false is needed: what is not the default, which need not be written."""
    return write(path, source, str(not _default(model, path)).lower())


def for_name(path: str, source: ValueSource, value: object) -> str:
    """Return a name that is like the given one."""
    near = as_name(str(value)).lstrip("_")
    return write(path, source, near) if near else "leave it out: the job then has the name of its script"


def for_text(path: str, source: ValueSource, value: Any, *, in_list: bool) -> str:
    """Return what to write where one text is needed."""
    if value is None:
        return 'remove it, or put it in quotes: "null"'
    if isinstance(value, bool):
        return f'put it in quotes: "{str(value).lower()}"'
    words = [word for word in value if isinstance(word, str)] if isinstance(value, list | tuple) else []
    if not words or len(words) < len(value) or in_list or is_secret(path):
        return "write one text, without brackets and braces"
    if path == "resources.nodes":
        return f"write hosts: [{', '.join(words)}] for these machines, over SSH"
    first = write(path, source, words[0])
    return f"{first} and args: {shlex.join(words[1:])}" if path == "script" and words[1:] else first


def _default(model: type[Section], path: str) -> Any:
    *sections, key = path.split(".")
    for section in sections:
        model = model.sections()[section]
    return model.model_fields[key].default
