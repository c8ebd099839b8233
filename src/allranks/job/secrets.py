"""Secrets of a job: kept out of everything that is written or shown.

A variable is taken for a secret by its name (see ``contract.is_secret``). Its value goes to the ranks through
the environment and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from allranks.contract import is_secret

if TYPE_CHECKING:
    from allranks.job.spec import Job

#: Stands in a record for the value of a secret. In a job file it means: take it from the calling environment.
PLACEHOLDER = "<secret>"

#: A shorter value is no good secret, and may well be a word that stands in other places by chance.
_SHORTEST_SCRUBBED = 8

# An assignment in a shell line: at its start, or after a character that ends a word or opens a list of them.
_ASSIGNMENT = re.compile(r"""(?:^|[\s;&|(`"',=])([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^\s;&|)"']*)""", re.ASCII)
_SETENV = re.compile(r"""\bsetenv\s+([A-Za-z_]\w*)\s+("[^"]*"|'[^']*'|[^\s;&|)"']+)""", re.ASCII)


def redacted(job: Job) -> dict[str, Any]:
    """Return the job as plain data for the record, with ``<secret>`` in place of every secret.

    Where the text of a secret of eight characters or more stands in another value, it is replaced there too.
    """
    secrets = secret_values(job.environment.variables)
    data: dict[str, Any] = job.model_dump(mode="json")
    variables = data["environment"].pop("variables")
    data = _scrub_all(data, secrets)
    data["environment"]["variables"] = {
        name: PLACEHOLDER if is_secret(name) else scrub(value, secrets) for name, value in variables.items()
    }
    return data


def secret_values(variables: Mapping[str, object]) -> tuple[str, ...]:
    """Return the values of those variables that hold secrets, the longest first."""
    values = {str(getattr(value, "written", value)) for name, value in variables.items() if is_secret(name)}
    return tuple(sorted(values, key=len, reverse=True))


def scrub(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` with ``<secret>`` wherever the value of a secret stands in it."""
    for secret in secrets:
        if len(secret) >= _SHORTEST_SCRUBBED:
            text = text.replace(secret, PLACEHOLDER)
    return text


def _scrub_all(value: Any, secrets: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return scrub(value, secrets)
    if isinstance(value, dict):
        return {key: _scrub_all(item, secrets) for key, item in value.items()}
    if isinstance(value, list):
        return [_scrub_all(item, secrets) for item in value]
    return value


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
