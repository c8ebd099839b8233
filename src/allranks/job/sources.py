"""Where the values of a job come from, and which of them counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from allranks.job.options import TARGETS

SourceKind: TypeAlias = Literal["flag", "environment", "job file", "cluster file", "default"]

#: Variables are merged name by name, each with a source of its own: ``environment.variables.NCCL_DEBUG``.
VARIABLES = "environment.variables"
#: The one path of a cluster file: it is meant from there, whatever job runs on that cluster.
CHECKS_FOLDER = "checks.folder"


@dataclass(frozen=True)
class Source:
    """Where a value comes from.

    Attributes:
        kind: the layer.
        where: the place in it: ``--nproc-per-node``, ``NPROC_PER_NODE``, ``job.yaml:7``; empty for defaults.
    """

    kind: SourceKind
    where: str = ""

    def __str__(self) -> str:
        """Write it as in ``job file job.yaml:7``."""
        return f"{self.kind} {self.where}".rstrip()


DEFAULT = Source("default")


@dataclass(frozen=True)
class Setting:
    """A value as it was given, and where."""

    value: Any
    source: Source


#: Settings by their path in the job: ``launch.nproc_per_node``, ``environment.variables.NCCL_DEBUG``.
Layer: TypeAlias = dict[str, Setting]


def merge(layers: Sequence[Layer]) -> Layer:
    """Return what counts; ``layers`` are in order of precedence, the strongest first.

    Script, module and binary are one choice: the strongest layer that makes it makes it alone.
    """
    merged: Layer = {}
    for layer in reversed(layers):
        if any(target in layer for target in TARGETS):
            for target in TARGETS:
                merged.pop(target, None)
        merged.update(layer)
    return merged


def nested(layer: Layer) -> dict[str, Any]:
    """Return the values of a layer as the mapping of mappings that the job file would be."""
    tree: dict[str, Any] = {}
    for path, setting in layer.items():
        *sections, leaf = split(path)
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = setting.value
    return tree


def split(path: str) -> list[str]:
    """Return the keys in a path; the name of a variable is one key whatever it holds."""
    if path.startswith(VARIABLES + "."):
        return [*VARIABLES.split("."), path[len(VARIABLES) + 1 :]]
    return path.split(".")


def variables_of(layer: Layer) -> dict[str, Any]:
    """Return the environment variables in a layer by name."""
    prefix = f"{VARIABLES}."
    return {path[len(prefix) :]: item.value for path, item in layer.items() if path.startswith(prefix)}


def texts_of(value: object) -> Iterator[str]:
    """Yield the texts in a setting's value, numbers as they were written among them."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)
    elif isinstance(value, dict):
        yield from texts_of([*value.keys(), *value.values()])
    elif value is not None and not isinstance(value, bool):
        yield str(getattr(value, "written", value))


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the path of every leaf of a dumped job; each variable is one, and a list is one as a whole."""
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from leaves(value, f"{path}.")
        else:
            yield path


def all_sources(data: Mapping[str, Any], merged: Layer) -> dict[str, Source]:
    """Return the source of every leaf of a dumped job; what no layer gives has the default's."""
    return {path: merged[path].source if path in merged else DEFAULT for path in leaves(data)}
