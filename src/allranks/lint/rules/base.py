"""What a rule is, and what the rules share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from allranks.lint.model import Part
from allranks.lint.reading import View

Severity = Literal["fatal", "likely", "hint"]

SBATCH, SRUN = "slurm.schedmd.com/sbatch.html", "slurm.schedmd.com/srun.html"
TORCHRUN = "torch/distributed/run.py of torch 2.13"
QSUB, BASH = "qsub(1B) of OpenPBS 23.06", "bash(1)"


@dataclass(frozen=True)
class Edit:
    """A change of a file: the bytes from ``start`` to ``end`` become ``text``."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True)
class Found:
    """A place that a rule objects to."""

    at: int  # The offset in the file.
    #: What stands in the rule's sentences in place of ``{name}``.
    fields: dict[str, object] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()  # What repairs this fault and changes nothing else.


Check = Callable[[View], Iterator[Found]]


@dataclass(frozen=True)
class Rule:
    """One kind of fault."""

    code: str  # Its stable code: AR and three digits, of which the first is the family.
    name: str  # Its name in words.
    #: ``fatal``: it cannot work, or trains wrongly; ``likely``: it often fails; ``hint``: it works, and a better way
    #: exists.
    severity: Severity
    what: str  # What will happen; ``{name}`` stands for a field of what was found.
    fix: str  # What to write instead.
    source: str  # Where the knowledge is from.
    check: Check  # Yields the places.
    versions: str = ""  # The versions of the program that behave so, if not all.


#: The rules of all modules that have been imported.
registered: list[Rule] = []


def _rule(
    severity: Severity, heading: str, what: str, *, fix: str, source: str, versions: str = ""
) -> Callable[[Check], Check]:
    """Make a rule of the function below, which yields the places; ``heading`` is its code and name."""
    code, name = heading.split()

    def register(check: Check) -> Check:
        registered.append(Rule(code, name, severity, what, fix, source, check, versions))
        return check

    return register


fatal, likely, hint = partial(_rule, "fatal"), partial(_rule, "likely"), partial(_rule, "hint")


def is_host_name(part: Part, programs: str = "hostname") -> bool:
    """Return whether a part becomes the name of the machine that expands it, or what one of the programs prints."""
    if part.kind == "command":
        return bool(re.match(rf"[$`]\(?(?:{programs})\b", part.text))
    return part.kind == "variable" and part.text == "HOSTNAME"
