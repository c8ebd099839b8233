"""Secrets of a job: kept out of everything that is written or shown.

A variable is taken for a secret by its name (see ``contract.is_secret``). Its value goes to the ranks through
the environment and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from allranks.contract import is_secret

if TYPE_CHECKING:
    from allranks.job.spec import Job

#: Stands in a record for the value of a variable. In a job file it means: take it from the calling environment.
PLACEHOLDER = "<secret>"

#: A shorter value is no good secret, and may well be a word that stands in other places by chance.
_SHORTEST = 8


def redacted(job: Job) -> dict[str, Any]:
    """Return the job as plain data for the record, with ``<secret>`` for every variable that holds a secret.

    No other value holds one: such a job cannot be loaded (see ``leaks.py``).
    """
    data: dict[str, Any] = job.model_dump(mode="json")
    hidden = secret_names(job.environment.variables)
    data["environment"]["variables"].update(dict.fromkeys(hidden, PLACEHOLDER))
    return data


def secret_names(variables: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the variables whose values are written nowhere.

    A variable that holds the value of a secret among other text, such as a URL, is one of them.
    """
    values = secret_values(variables)
    return tuple(name for name, value in variables.items() if is_secret(name) or holds(str(value), values))


def secret_values(*variables: Mapping[str, object]) -> tuple[str, ...]:
    """Return the values of those variables that hold secrets, the longest first."""
    return tuple(sorted({value for given in variables for value in secrets_in(given)}, key=len, reverse=True))


def secrets_in(variables: Mapping[str, object]) -> dict[str, str]:
    """Return the names of the variables that hold secrets by their values, which must be seen nowhere."""
    texts = {str(getattr(value, "written", value)): name for name, value in variables.items() if is_secret(name)}
    return {text: name for text, name in texts.items() if _must_be_hidden(text)}


def _must_be_hidden(text: str) -> bool:
    """Tell whether a secret's text would give it away; the path of a file that holds the secret does not."""
    return len(text) >= _SHORTEST and not os.path.exists(os.path.expanduser(text))  # noqa: PTH110, PTH111 - any text


def holds(text: str, secrets: Iterable[str]) -> bool:
    """Tell whether the value of a secret stands in ``text``."""
    return any(secret in text for secret in secrets)


def scrub(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` with ``<secret>`` wherever the value of a secret stands in it."""
    for secret in secrets:
        text = text.replace(secret, PLACEHOLDER)
    return text
