"""The rules: a family is a file or more, and a rule stands above the function that finds its fault."""

from __future__ import annotations

from importlib import import_module

from allranks.lint.rules.base import registered

#: What the first digit of a code stands for.
FAMILIES = {
    "1": "Processes and nodes",
    "2": "Quoting and variables",
    "3": "Rendezvous",
    "4": "Schedulers",
    "5": "Settings of NCCL, torch and gloo",
    "6": "SSH and pdsh",
    "7": "Exit codes, signals and requeueing",
    "8": "Environments and launchers",
    "9": "Secrets, and what hurts others",
}

#: Each registers its rules.
_MODULES = (
    "processes gpus words variables rendezvous ports scheduling directories pbs network remote outcome environment "
    "habits"
)
for _name in _MODULES.split():
    import_module(f"{__name__}.{_name}")

RULES = tuple(sorted(registered, key=lambda rule: rule.code))
