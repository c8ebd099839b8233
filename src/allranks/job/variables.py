"""Environment variables of a job: names that cannot be given a value, and secrets, which are not written or shown.

A variable is taken for a secret by its name (see ``contract.is_secret``). Its value goes to the ranks through
the environment and nowhere else.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.contract import is_secret
from allranks.job.options import LOG_LEVEL_PATH, OPTIONS
from allranks.job.problems import Problem, closest, quoted
from allranks.job.sources import VARIABLES, WEBHOOK, Layer, texts_of, variables_of
from allranks.system import schedulers

if TYPE_CHECKING:
    from allranks.job.spec import Job

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

#: Variables of bash's own: it refuses a value for them, or gives them another one (man 1 bash, Shell Variables).
SHELL_NAMES = {
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

#: Stands in a record for the value of a variable. In a job file it means: take it from the calling environment.
PLACEHOLDER = "<secret>"

#: A shorter value is a poor secret, and often a word that occurs elsewhere by chance.
_SHORTEST = 8

#: Shell lines and words of commands: a variable can be given a value in them.
_COMMANDS = (
    *("environment.setup", "environment.node_setup", "environment.container"),
    *("launch.launcher_args", "scheduler.directives", "notify.command"),
)

# An assignment in a shell line: at its start, or after a character that ends a word or opens a list of them.
_ASSIGNMENT = re.compile(r"""(?:^|[\s;&|(`"',=])([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^\s;&|)"']*)""", re.ASCII)
_SETENV = re.compile(r"""\bsetenv\s+([A-Za-z_]\w*)\s+("[^"]*"|'[^']*'|[^\s;&|)"']+)""", re.ASCII)


def _is_set_for_ranks(name: str) -> bool:
    return name in _RANK_VARIABLES or name.startswith(_TORCHELASTIC)


def without_those_of_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that agents do not set for ranks: a command in a rank must not pass on its place."""
    return {name: value for name, value in environ.items() if not _is_set_for_ranks(name)}


def for_another_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command that submits a job: nothing of a job, or of a run, that it is itself in."""
    return schedulers.outside_of_jobs(without_those_of_ranks(environ))


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
        near = re.sub(r"\W", "_", name, flags=re.ASCII)
        fix = f"rename it: {f'_{near}' if near[:1].isdigit() else near}" if near else "NAME=VALUE"
        return Problem(where, f"invalid name of an environment variable: {quoted(name)}", why=why, fix=fix)
    if name in SHELL_NAMES:
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


def redacted(job: Job) -> dict[str, Any]:
    """Return the job as plain data for the record, with ``<secret>`` for its webhook and variables that hold secrets.

    No other value holds one: such a job cannot be loaded (see :func:`secret_problems`).
    """
    data: dict[str, Any] = job.model_dump(mode="json")
    data["environment"]["variables"].update(dict.fromkeys(secret_names(job.environment.variables), PLACEHOLDER))
    if job.notify.webhook:
        data["notify"]["webhook"] = PLACEHOLDER
    return data


def secret_names(variables: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the variables whose values are never written to disk.

    A variable that holds the value of a secret among other text, such as a URL, is one of them.
    """
    secrets = secret_values(variables)
    return tuple(
        name for name, value in variables.items() if is_secret(name) or any(secret in str(value) for secret in secrets)
    )


def secret_values(*variables: Mapping[str, object]) -> tuple[str, ...]:
    """Return the values of those variables that hold secrets, the longest first."""
    values = set[str]().union(*map(_names_by_value, variables))
    return tuple(sorted(values, key=len, reverse=True))


def _names_by_value(variables: Mapping[str, object]) -> dict[str, str]:
    texts = {str(value): name for name, value in variables.items() if is_secret(name)}
    long = {text: name for text, name in texts.items() if len(text) >= _SHORTEST}
    # The path of a file that holds a secret does not give it away.
    return {text: name for text, name in long.items() if not os.path.exists(os.path.expanduser(text))}  # noqa: PTH110, PTH111 - any text


def scrub(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` with ``<secret>`` instead of each value of a secret."""
    for secret in secrets:
        text = text.replace(secret, PLACEHOLDER)
    return text


def fill_secrets(layer: Layer, environ: Mapping[str, str], problems: list[Problem]) -> Layer:
    """Put the caller's values where a record has ``<secret>``: a recorded job can be started again."""
    filled = dict(layer)
    for path, setting in layer.items():
        name, where = path.removeprefix(f"{VARIABLES}."), setting.source.where
        if name != path and setting.value == PLACEHOLDER:
            if name in environ:
                filled[path] = setting._replace(value=environ[name])
                continue
            why = f"{PLACEHOLDER} stands for the value in the calling environment"
            problems.append(Problem(where, f"{name} is not set here", why=why, fix=f"export {name}=..."))
        elif path == WEBHOOK and setting.value == PLACEHOLDER:
            why = f"{PLACEHOLDER} stands for the value of {contract.NOTIFY_WEBHOOK} in the calling environment"
            fix = f"export {contract.NOTIFY_WEBHOOK}=..., or write the URL"
            problems.append(Problem(where, f"{contract.NOTIFY_WEBHOOK} is not set here", why=why, fix=fix))
            del filled[path]
        elif any(PLACEHOLDER in text for text in texts_of(setting.value)):
            why = "these words stand for the whole value of an environment variable, and for nothing else"
            problems.append(Problem(where, f"{path} holds {PLACEHOLDER}", why=why, fix="write what belongs there"))
    hidden = secret_names(variables_of(filled))
    for path, setting in layer.items():
        name = path.removeprefix(f"{VARIABLES}.")
        if path in filled and filled[path] is not setting and name not in hidden:  # It would be written.
            why = "the value that it has here holds no secret of the job, and its name is not one of a secret"
            fix = f"leave {name} out, the ranks have it from the environment; or write its value"
            problems.append(Problem(setting.source.where, f"{name} cannot be {PLACEHOLDER}", why=why, fix=fix))
    return filled


def secret_problems(layer: Layer, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the places where a secret would be written into scripts and records.

    Secrets are the values of the job's secret variables and of those of the calling environment; and whatever
    a shell line assigns to a variable of such a name.
    """
    variables = variables_of(layer)
    own, callers = _names_by_value(variables), _names_by_value(environ)
    hidden = {WEBHOOK, *(f"{VARIABLES}.{name}" for name in secret_names(variables))}
    for path, setting in layer.items():
        if path in hidden:
            continue
        lines = [line for text in texts_of(setting.value) for line in text.splitlines()] if path in _COMMANDS else []
        assigned = [*dict.fromkeys(filter(None, map(literal_secret, lines)))]
        for name in assigned:
            what = f"{path} gives {name} a secret in plain text"
            why = "these lines are written into scripts and records"
            fix = f"put {name} into environment.variables, or export it before you start allranks"
            yield Problem(setting.source.where, what, why=why, fix=fix)
        owner = _owner(setting.value, {**callers, **own})
        if owner and not assigned:
            why = "a job's texts are written into scripts and records, and everybody on the machine can see arguments"
            fix = f"take it out: the script and the setup lines have {owner} in their environment"
            if path.startswith(f"{VARIABLES}."):
                fix = f"write '{owner}: {PLACEHOLDER}' beside it, or --env {owner}: then both are kept secret"
            if owner not in own.values():
                fix += f"; if it is not a secret: env -u {owner} allranks ..."
            yield Problem(setting.source.where, f"the value of {owner} stands in {path}", why=why, fix=fix)


def _owner(value: object, secrets: Mapping[str, str]) -> str | None:
    """Return the name of a secret whose value stands in a setting; None if no value does."""
    if not secrets:
        return None
    text = "\n".join(texts_of(value))
    # A shell or we split some of the texts into words: a secret may look different before, in quotes.
    for line in text.splitlines():
        with suppress(ValueError):  # Quotes are open: these are not words, or not all of them.
            text = "\n".join([text, *shlex.split(line)])
    return next((name for secret, name in secrets.items() if secret in text), None)


def literal_secret(line: str) -> str | None:
    """Return the name of a variable to which a shell line gives a secret in plain text, if there is one.

    A value that the shell expands, such as ``$(cat ~/.key)`` or ``$OTHER``, is not plain text.
    """
    for pattern in (_ASSIGNMENT, _SETENV):
        for match in pattern.finditer(line):
            value = match[2]
            is_literal = value != "''" if value.startswith("'") else value.strip('"') and not re.search(r"[$`]", value)
            if is_literal and is_secret(match[1]):
                return match[1]
    return None
