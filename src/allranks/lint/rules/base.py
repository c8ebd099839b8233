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
BASH = "bash(1)"


@dataclass(frozen=True)
class Edit:
    """A change of a file: the bytes from ``start`` to ``end`` become ``text``."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True)
class Found:
    """A place that a rule objects to.

    Attributes:
        at: the offset in the file.
        fields: what stands in the rule's sentences in place of ``{name}``.
        edits: what repairs this fault and changes nothing else.
    """

    at: int
    fields: dict[str, object] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()


Check = Callable[[View], Iterator[Found]]


@dataclass(frozen=True)
class Rule:
    """One kind of fault.

    Attributes:
        code: its stable code: AR and three digits, of which the first is the family.
        name: its name in words.
        severity: ``fatal``: it cannot work, or trains wrongly; ``likely``: it often fails; ``hint``: it works, and a
            better way exists.
        what: what will happen; ``{name}`` stands for a field of what was found.
        fix: what to write instead.
        source: where the knowledge is from.
        check: yields the places.
        versions: the versions of the program that behave so, if not all.
    """

    code: str
    name: str
    severity: Severity
    what: str
    fix: str
    source: str
    check: Check
    versions: str = ""


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
