"""``allranks schema``: the JSON Schema of the job file."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Any

import click

from allranks.cli import render

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


@click.command("schema")
def command() -> int:
    """Print the JSON Schema of the job file, for editors."""
    render.as_json(job_schema())
    return 0


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job file, as plain data."""
    from allranks.job import spec

    schema = spec.Job.model_json_schema()
    texts = _docstrings(inspect.getsource(spec))
    for name, definition in {**schema["$defs"], "Job": schema}.items():
        definition["properties"] = {
            key: _property(value, texts[name, key]) for key, value in definition["properties"].items()
        }
    schema["$defs"]["Resources"]["properties"]["nodes"]["default"] = "1"
    schema["$defs"]["Sync"]["properties"]["max_size"]["default"] = "1G"
    for name, section in spec.Job.sections().items():
        if section.short_for:  # A plain value may stand instead of the section.
            short = schema["$defs"][section.__name__]["properties"][section.short_for]["anyOf"][0]
            schema["properties"][name]["anyOf"].insert(1, short)
    return {"$schema": _DIALECT, **schema, "title": "allranks job file"}


def _property(found: dict[str, Any], description: str) -> dict[str, Any]:
    """Return the schema of a field with its description, and with null, which means that it is not given."""
    for key in ("title", "description"):
        found.pop(key, None)
    default = found.pop("default", None)
    notes = {} if "$ref" in found or default is None else {"default": default}
    choices, nothing = found.get("anyOf", [found]), {"type": "null"}
    if nothing not in choices:
        choices = [*choices, nothing]
    return {**notes, "description": description, "anyOf": choices}


def _docstrings(source: str) -> dict[tuple[str, str], str]:
    """Return the texts below the fields of classes by class and field, each as one line."""
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for statement, after in pairwise(node.body):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[node.name, statement.target.id] = " ".join(str(after.value.value).split())
    return found
