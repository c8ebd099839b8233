"""JSON Schema of the job file, for editors."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

from allranks.job import spec
from allranks.job.files import sections_of

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ANNOTATIONS = ("title", "description", "default")


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job file, as plain data."""
    schema = spec.Job.model_json_schema()
    texts = _docstrings()
    for name, definition in {**schema["$defs"], "Job": schema}.items():
        definition["properties"] = {
            key: _property(value, texts[name, key]) for key, value in definition["properties"].items()
        }
    schema["$defs"]["Resources"]["properties"]["nodes"]["default"] = "1"
    schema["$defs"]["Sync"]["properties"]["max_size"]["default"] = "1G"
    for name, section in sections_of(spec.Job).items():
        if section.short_for:  # A plain value may stand in place of the section.
            short = schema["$defs"][section.__name__]["properties"][section.short_for]["anyOf"][0]
            schema["properties"][name]["anyOf"].insert(1, short)
    return {"$schema": _DIALECT, **schema, "title": "allranks job file"}


def _property(found: dict[str, Any], description: str) -> dict[str, Any]:
    """Return the schema of a field with its description, and with null, which means that it is not given."""
    notes = {key: found.pop(key) for key in _ANNOTATIONS if key in found}
    if "$ref" in found or notes.get("default") is None:
        notes.pop("default", None)
    notes.pop("title", None)
    choices = found.get("anyOf", [found])
    nothing = {"type": "null"}
    return {
        **notes,
        "description": description,
        "anyOf": [*choices, *([] if nothing in choices else [nothing])],
    }


def _docstrings() -> dict[tuple[str, str], str]:
    """Return the texts below the fields of ``spec.py`` by class and field, each as one line."""
    tree = ast.parse(inspect.getsource(spec))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {(node.name, field): " ".join(text.split()) for node in classes for field, text in _fields(node)}


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, after in zip(node.body, node.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield statement.target.id, str(after.value.value)
