"""A launcher's command line that was pasted where a script is expected, as ours."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.cli import render
from allranks.errors import UsageError
from allranks.job.options import OPTIONS, TARGETS

if TYPE_CHECKING:
    from allranks.convert.draft import Draft

_PYTHON = re.compile(r"python[\d.]*")
_TORCH_MODULE = re.compile(r"torch\.distributed\.(run|launch)|accelerate\.commands\.launch")
#: What may stand before a launcher.
_SETS = re.compile(r"env|[A-Za-z_]\w*=.*", re.DOTALL)
_LAUNCHERS = ("torchrun", "srun", "mpirun", "mpiexec", "deepspeed")
_FLAGS = {**{option.path: option.flags[0] for option in OPTIONS}, "resources.nodes": "--nodes"}
_VARIABLES = "environment.variables."


def start_of(words: Sequence[str], valueless: Collection[str]) -> int | None:
    """Return where a launcher's command line starts among the words of a verb; None if none does.

    Args:
        words: what follows the verb.
        valueless: the verb's options that take no value.
    """
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        is_value = before.startswith("-") and "=" not in before and before.replace("_", "-") not in valueless
        if not is_value and name_of(words[at:]) and ("/" in word or not Path(word).is_file()):
            return at
        if word == "--" or word.endswith((".py", ".yaml", ".yml")):
            return None
    return None


def name_of(words: Sequence[str]) -> str | None:
    """Return what a command line starts with, if that is a launcher or a Python."""
    name = words[0].rpartition("/")[2] if words else ""
    if name == "accelerate" and words[1:2] == ["launch"]:
        return "accelerate launch"
    if _PYTHON.fullmatch(name):
        after = next((at + 1 for at, word in enumerate(words) if word == "-m"), len(words))
        module = next(iter(words[after:]), "")
        return f"{name} -m {module}" if _TORCH_MODULE.fullmatch(module) else name
    return name if name in _LAUNCHERS else None


def error_of(words: Sequence[str], verb: str, before: Sequence[str] = ()) -> UsageError:
    """Make the error for a pasted command line; ``verb`` is ours, with the words ``before`` that line.

    What has no place in our command is shown as notes.
    """
    own = len(before)
    while own and _SETS.fullmatch(before[own - 1]) and before[own - 2 : own - 1] != ["--env"]:
        own -= 1
    name = name_of(words) or words[0]
    is_python = bool(_PYTHON.fullmatch(name))
    what = f"{name} is {'an interpreter' if is_python else 'a launcher'}, not a script"
    draft = _read([*before[own:], *words])
    if draft is None:
        return UsageError(what, fix=f"{verb} train.py --nproc-per-node N -- ...")
    for note in draft.notes:
        if note.kind == "not taken over" and "number of ranks" not in note.what:  # Said below, with what to type.
            render.talk(f"allranks: note: {note.what}")
    if not is_python and "launch.nproc_per_node" not in draft.values and name in ("srun", "mpirun", "mpiexec"):
        render.talk("allranks: note: --nodes N and --nproc-per-node N say how many ranks start")
    args = draft.get("args") or []
    return UsageError(
        what, fix=shlex.join([*verb.split(), *_ours(draft, is_python, before[:own]), *(["--", *args] if args else [])])
    )


def _read(words: Sequence[str]) -> Draft | None:
    """Return a command line as a draft of a job; None if it starts no training that is known."""
    from allranks.convert.convert import drafts_of

    try:
        draft = drafts_of("the line", f"env {shlex.join(words)}\n".encode())[0]
    except (UsageError, UnicodeEncodeError):
        return None
    script = draft.get("script")
    is_known = (
        script.endswith(".py") or Path(script).exists() if script else any(each in draft.values for each in TARGETS)
    )
    return draft if is_known else None  # Else it may be the value of an option that is not known.


def _ours(draft: Draft, is_python: bool, before: Sequence[str]) -> Iterator[str]:
    """Yield target and options of our command; a Python alone has one rank, which it does not ask for."""
    target = next(target for target in TARGETS if target in draft.values)
    yield from () if target == "script" else (f"--{target}",) if target == "binary" else ("-m",)
    yield str(draft.get(target))
    yield from before
    for path, given in draft.values.items():
        name = path.removeprefix(_VARIABLES)
        if path.startswith(_VARIABLES):
            yield from ("--env", name if contract.is_secret(name) else f"{name}={given.value}")
        elif path in _FLAGS and path != "name" and not (is_python and path == "launch.nproc_per_node"):
            yield from (_FLAGS[path], _text(given.value, " " if path == "environment.python" else ","))


def _text(value: object, between: str) -> str:
    return between.join(map(str, value)) if isinstance(value, list) else str(value)
