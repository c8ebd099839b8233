"""Names of environment variables that a job cannot give a value, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from allranks import contract
from allranks.job.options import LOG_LEVEL_PATH, OPTIONS
from allranks.job.problems import Problem, closest, quoted
from allranks.job.sources import VARIABLES, Layer

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

#: Variables of bash's own: it refuses a value for them, or gives them another one (man 1 bash, Shell Variables).
_SHELL_NAMES = {
    *("BASHOPTS", "BASHPID", "BASH_VERSINFO", "COMP_WORDBREAKS", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID"),
    *("FUNCNAME", "GROUPS", "HISTCMD", "LINENO", "PPID", "RANDOM", "SECONDS", "SHELLOPTS", "SRANDOM", "UID"),
}

#: Variables that the agent sets for each rank, as torchrun does.
_RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}
_TORCHELASTIC, _OURS = "TORCHELASTIC_", "ALLRANKS_"

#: What decides the values of such variables; for those that an option reads, see its table.
_DECIDED_BY = {
    "WORLD_SIZE": "resources.nodes (--nnodes) and launch.nproc_per_node (--nproc-per-node)",
    "LOCAL_WORLD_SIZE": "launch.nproc_per_node (--nproc-per-node)",
    "GROUP_WORLD_SIZE": "resources.nodes (--nnodes)",
    "TORCHELASTIC_MAX_RESTARTS": "launch.max_restarts (--max-restarts)",
} | {
    name: f"{option.path.replace(LOG_LEVEL_PATH, 'debug')} ({option.flags[0]})"
    for option in OPTIONS
    for name in option.variables
}


def _is_set_for_ranks(name: str) -> bool:
    return name in _RANK_VARIABLES or name.startswith(_TORCHELASTIC)


def without_those_of_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that agents do not set for ranks: a command in a rank must not pass on its place."""
    return {name: value for name, value in environ.items() if not _is_set_for_ranks(name)}


def misspelt(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield variables whose names start as ours and that nothing reads, each with the one that was probably meant."""
    read = {name.removeprefix(_OURS) for option in OPTIONS for name in option.variables if name.startswith(_OURS)}
    known = read | {value.removeprefix(_OURS) for value in vars(contract).values() if isinstance(value, str)}
    for name in sorted(environ):
        word = name.removeprefix(_OURS)
        if environ[name] and word != name and word not in known and (near := closest(word, read)):
            yield name, f"{_OURS}{near}"


def variable_problems(layer: Layer) -> Iterator[Problem]:
    """Yield what is wrong with the names of the job's variables."""
    for path, setting in layer.items():
        name = path.removeprefix(f"{VARIABLES}.")
        if name != path and (found := _problem(name, setting.source.where)):
            yield found


def _problem(name: str, where: str) -> Problem | None:
    if not _NAME.fullmatch(name):
        why = "a name is letters, digits and '_', and does not start with a digit"
        return Problem(where, f"invalid name of an environment variable: {quoted(name)}", why=why)
    if name in _SHELL_NAMES:
        return Problem(where, f"{quoted(name)} cannot be set: the shell keeps that name for itself", fix="another name")
    if name.startswith(_OURS):
        why, fix = f"names that start with {_OURS} are those of allranks itself", "take another name"
    elif _is_set_for_ranks(name):
        why, fix = "its agent sets it for each rank", "leave it out"
    else:
        return None
    if name in _DECIDED_BY:
        fix = f"write {_DECIDED_BY[name]}"
    return Problem(where, f"{quoted(name)} cannot be set", why=why, fix=fix)
