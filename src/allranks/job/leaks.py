"""Finds secrets that stand where they would be written: in any text of a job but the secret variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from allranks.contract import is_secret
from allranks.job.problems import Problem
from allranks.job.secrets import PLACEHOLDER, secret_names, secrets_in
from allranks.job.sources import VARIABLES, Layer, Setting, texts_of, variables_of

#: Shell lines and words of commands: a variable can be given a value in them.
_COMMANDS = (
    "environment.setup",
    "environment.node_setup",
    "environment.container",
    "launch.launcher_args",
    "scheduler.directives",
)

# An assignment in a shell line: at its start, or after a character that ends a word or opens a list of them.
_ASSIGNMENT = re.compile(r"""(?:^|[\s;&|(`"',=])([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^\s;&|)"']*)""", re.ASCII)
_SETENV = re.compile(r"""\bsetenv\s+([A-Za-z_]\w*)\s+("[^"]*"|'[^']*'|[^\s;&|)"']+)""", re.ASCII)


def secret_problems(layer: Layer, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the places where a secret would be written into scripts and records.

    Secrets are the values of the job's secret variables and of those of the calling environment; and whatever
    a shell line assigns to a variable of such a name.
    """
    variables = variables_of(layer)
    own, callers = secrets_in(variables), secrets_in(environ)
    hidden = {f"{VARIABLES}.{name}" for name in secret_names(variables)}
    for path, setting in layer.items():
        if path in hidden:
            continue
        assigned = list(_assigned(setting.value)) if path in _COMMANDS else []
        yield from (_assignment_problem(path, setting, name) for name in assigned)
        owner = _owner(setting.value, {**callers, **own})
        if owner and not assigned:
            yield _leak(path, setting, owner, is_callers=owner not in own.values())


def _owner(value: object, secrets: Mapping[str, str]) -> str | None:
    """Return the name of the secret whose value stands in a setting, if one does."""
    if not secrets:
        return None
    text = "\n".join(texts_of(value))
    # A shell or we split some of the texts into words: a secret may look different before, in quotes.
    seen = "\n".join([text, *(word for line in text.splitlines() for word in _words(line))])
    return next((name for secret, name in secrets.items() if secret in seen), None)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return []  # Quotes are open: these are not words, or not all of them.


def _leak(path: str, setting: Setting, owner: str, *, is_callers: bool) -> Problem:
    what = f"the value of {owner} stands in {path}"
    why = "a job's texts are written into scripts and records, and everybody on the machine can see arguments"
    fix = f"take it out: the script and the setup lines have {owner} in their environment"
    if path.startswith(f"{VARIABLES}."):
        fix = f"write '{owner}: {PLACEHOLDER}' beside it, or --env {owner}: then both are kept secret"
    if is_callers:
        fix += f"; if it is no secret: env -u {owner} allranks ..."
    return Problem(setting.source.where, what, why=why, fix=fix)


def _assignment_problem(path: str, setting: Setting, name: str) -> Problem:
    return Problem(
        setting.source.where,
        f"{path} gives {name} a secret in plain text",
        why="these lines are written into scripts and records",
        fix=f"put {name} into environment.variables, or export it before you start allranks",
    )


def _assigned(value: object) -> Iterator[str]:
    lines = [line for text in texts_of(value) for line in text.splitlines()]
    yield from dict.fromkeys(filter(None, map(literal_secret, lines)))


def literal_secret(line: str) -> str | None:
    """Return the name of a variable to which a shell line gives a secret in plain text, if there is one.

    A value that the shell expands, such as ``$(cat ~/.key)`` or ``$OTHER``, is no plain text.
    """
    for pattern in (_ASSIGNMENT, _SETENV):
        for match in pattern.finditer(line):
            if is_secret(match[1]) and _is_literal(match[2]):
                return match[1]
    return None


def _is_literal(value: str) -> bool:
    if value.startswith("'"):
        return value != "''"
    return bool(value.strip('"')) and "$" not in value and "`" not in value
