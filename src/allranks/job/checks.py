"""Checks of a job's values, with every finding in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from allranks.contract import is_secret
from allranks.job.options import TARGETS
from allranks.job.problems import Problem, did_you_mean, listed, quoted
from allranks.job.secrets import holds, scrub
from allranks.job.sources import DEFAULT, Layer, Setting, nested, texts_of

Model = TypeVar("Model", bound=BaseModel)

_MOST_TEXT = 200

_RULES = {
    "int": "it must be a whole number",
    "float": "it must be a number",
    "finite": "it must be a number",
    "bool": "it must be true or false",
    "string_type": "it must be text",
    "string_pattern": "it takes up to 64 letters, digits, '.', '_' and '-', a letter or digit first",
    "tuple": "it must be a list, or a line of text",
    "dict": "it must be a mapping of names to values",
    "greater_than_equal": "it must be at least {ge}",
    "less_than_equal": "it must be at most {le}",
    "missing": "it must be given",
}


def validated(model: type[Model], layer: Layer, secrets: tuple[str, ...], problems: list[Problem]) -> Model | None:
    """Return the settings as a typed object, or None when some are wrong; no message shows a secret."""
    try:
        return model.model_validate(nested(layer))
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
    problems += [_translated(dict(item), layer, secrets) for item in found]
    return None


def _translated(item: dict[str, Any], layer: Layer, secrets: tuple[str, ...]) -> Problem:
    """Say in plain words what pydantic found."""
    path, setting, rest = _located(item["loc"], layer)
    value = setting.value
    for key in rest:
        value = value[key] if isinstance(value, list | tuple) and isinstance(key, int) else value
    why, fix = _rule(item, value, secrets)
    subject = "" if setting.source.kind in ("flag", "environment") else f"{path} "
    entry = f"entry {rest[0] + 1} " if rest and isinstance(rest[0], int) else ""
    what = f"{subject}{entry}cannot be {_shown(path, value, secrets)}"
    return Problem(setting.source.where, what, why=why, fix=fix)


def _located(loc: tuple[int | str, ...], layer: Layer) -> tuple[str, Setting, tuple[int | str, ...]]:
    """Return the setting that an error is about, and where in its value."""
    for end in range(len(loc), 0, -1):
        path = ".".join(str(key) for key in loc[:end])
        if path in layer:
            return path, layer[path], loc[end:]
    return ".".join(str(key) for key in loc), Setting(None, DEFAULT), ()


def _rule(item: dict[str, Any], value: object, secrets: tuple[str, ...]) -> tuple[str, str | None]:
    context = item.get("ctx", {})
    if item["type"] == "literal_error":
        choices = re.findall(r"'([^']+)'", context["expected"])
        return f"it must be {listed(choices)}", did_you_mean(str(value), choices)
    if item["type"] == "value_error":
        return _own_rule(_without(str(context["error"]), value, secrets), value)
    rule = next((text for kind, text in _RULES.items() if item["type"].startswith(kind)), "it is of the wrong kind")
    return _own_rule(rule.format(**context), value)


def _without(text: str, value: object, secrets: tuple[str, ...]) -> str:
    """Take a value out of a sentence that quotes it, if it holds a secret (escaping may change its look)."""
    if isinstance(value, str) and holds(value, secrets):
        return text.replace(repr(value), "this").replace(repr(value.strip()), "this")
    return text


def _own_rule(text: str, value: object) -> tuple[str, str | None]:
    """Take a sentence of ours apart: the rule, and after a semicolon what to write."""
    if text == "it must be text" and isinstance(value, bool):
        return text, f'put it in quotes: "{str(value).lower()}"'
    why, _, fix = text.rpartition("; ") if "; " in text else (text, "", "")
    return why[:_MOST_TEXT], fix or None


def _shown(path: str, value: object, secrets: tuple[str, ...]) -> str:
    """Return a value as messages show it; a secret is never shown."""
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if is_secret(path):
        return "what it is"
    text = scrub(str(getattr(value, "written", value)), secrets)
    return quoted(text) if isinstance(value, str) else text


def text_problems(layer: Layer) -> Iterator[Problem]:
    """Yield what is wrong with texts, whatever they are for."""
    for path, setting in layer.items():
        if any("\0" in text for text in texts_of(setting.value)):
            why = "neither arguments nor environment variables can hold one"
            yield Problem(setting.source.where, f"{path} holds a NUL character", why=why, fix="remove it")


def target_problems(layer: Layer, *, has_file: bool) -> Iterator[Problem]:
    """Yield what is wrong with the choice of script, module or binary, of a job with a job file or without."""
    given = [target for target in TARGETS if target in layer]
    if len(given) > 1:
        where = layer[given[-1]].source.where
        what = f"{listed(given, 'and')} are given, but a job has only one of them"
        places = [f"{target} at {layer[target].source.where}" for target in given]
        yield Problem(where, what, why=listed(places, "and"), fix=f"remove {listed(given[1:])}")
    elif not given:
        why = (
            "the job file names none" if has_file else "there is no job.yaml in this directory, and no script was given"
        )
        write = "write 'script: train.py' in the job file" if has_file else "allranks init writes a job.yaml"
        fix = f"{write}, or allranks run train.py (or -m MODULE, --binary FILE)"
        yield Problem("", "the job has no script, module or binary", why=why, fix=fix)


def unknown_cluster(name: str, setting: Setting, known: Mapping[str, object]) -> Problem:
    """Return the problem of a cluster that no file names."""
    hint = did_you_mean(name, known)
    names = f"known clusters: {listed(known, 'and')}"
    return Problem(setting.source.where, f"there is no cluster {quoted(name)}", why=names, fix=hint)
