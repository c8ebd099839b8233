"""Secrets of a job: kept out of everything that is written or shown.

A variable is taken for a secret by its name (see ``contract.is_secret``). Its value goes to the ranks through
the environment and nowhere else.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from allranks.contract import is_secret
from allranks.job.problems import Problem
from allranks.job.sources import VARIABLES, Layer, texts_of, variables_of

if TYPE_CHECKING:
    from allranks.job.spec import Job

#: Stands in a record for the value of a variable. In a job file it means: take it from the calling environment.
PLACEHOLDER = "<secret>"

#: A shorter value is no good secret, and may well be a word that stands in other places by chance.
_SHORTEST = 8

#: Shell lines and words of commands: a variable can be given a value in them.
_COMMANDS = (
    *("environment.setup", "environment.node_setup", "environment.container"),
    *("launch.launcher_args", "scheduler.directives"),
)

# An assignment in a shell line: at its start, or after a character that ends a word or opens a list of them.
_ASSIGNMENT = re.compile(r"""(?:^|[\s;&|(`"',=])([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^\s;&|)"']*)""", re.ASCII)
_SETENV = re.compile(r"""\bsetenv\s+([A-Za-z_]\w*)\s+("[^"]*"|'[^']*'|[^\s;&|)"']+)""", re.ASCII)


def redacted(job: Job) -> dict[str, Any]:
    """Return the job as plain data for the record, with ``<secret>`` for the variables that hold secrets.

    No other value holds one: such a job cannot be loaded (see :func:`secret_problems`).
    """
    data: dict[str, Any] = job.model_dump(mode="json")
    data["environment"]["variables"].update(dict.fromkeys(secret_names(job.environment.variables), PLACEHOLDER))
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
    return tuple(sorted({value for given in variables for value in _names_by_value(given)}, key=len, reverse=True))


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
                filled[path] = replace(setting, value=environ[name])
                continue
            why = f"{PLACEHOLDER} stands for the value in the calling environment"
            problems.append(Problem(where, f"{name} is not set here", why=why, fix=f"export {name}=..."))
        elif any(PLACEHOLDER in text for text in texts_of(setting.value)):
            why = "these words stand for the whole value of an environment variable, and for nothing else"
            problems.append(Problem(where, f"{path} holds {PLACEHOLDER}", why=why, fix="write what belongs there"))
    hidden = secret_names(variables_of(filled))
    for path, setting in layer.items():
        name = path.removeprefix(f"{VARIABLES}.")
        if filled[path] is not setting and name not in hidden:  # It would be written.
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
    hidden = {f"{VARIABLES}.{name}" for name in secret_names(variables)}
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

    A value that the shell expands, such as ``$(cat ~/.key)`` or ``$OTHER``, is no plain text.
    """
    for pattern in (_ASSIGNMENT, _SETENV):
        for match in pattern.finditer(line):
            value = match[2]
            is_literal = value != "''" if value.startswith("'") else value.strip('"') and not re.search(r"[$`]", value)
            if is_literal and is_secret(match[1]):
                return match[1]
    return None
