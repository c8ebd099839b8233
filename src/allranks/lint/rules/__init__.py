"""The rules, as a table: a family is a file."""

from __future__ import annotations

from allranks.lint.rules import environment, habits, network, outcome, processes, remote, rendezvous, scheduling, words
from allranks.lint.rules.base import Rule

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

RULES: tuple[Rule, ...] = (
    *processes.RULES,
    *words.RULES,
    *rendezvous.RULES,
    *scheduling.RULES,
    *network.RULES,
    *remote.RULES,
    *outcome.RULES,
    *environment.RULES,
    *habits.RULES,
)

BY_CODE = {rule.code: rule for rule in RULES}
