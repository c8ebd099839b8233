"""Job file and cluster file: found, read, and turned into settings with their lines."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from allranks.errors import JobError
from allranks.job.options import OPTIONS
from allranks.job.problems import Problem, closest, did_you_mean, listed, one_of, quoted, shown_path
from allranks.job.sources import VARIABLES, Layer, Setting, Source, SourceKind
from allranks.job.spec import Section
from allranks.job.yaml import Entry, Value, parse_yaml

CLUSTER_FILE = "clusters.yaml"

_LARGEST_FILE = 256 * 1024
_YAML_SUFFIXES = (".yaml", ".yml")
_INIT = "allranks init writes one to start from"


def sections_of(model: type[BaseModel]) -> dict[str, type[Section]]:
    """Return the fields of a model that are sections themselves, with their types."""
    return {
        name: field.annotation
        for name, field in model.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def known_paths(root: type[BaseModel]) -> dict[str, str]:
    """Return the paths in a file by the names that people give them: fields, and spellings of flags."""
    names: dict[str, str] = {}
    for option in OPTIONS:
        if option.path.split(".")[0] in root.model_fields:
            long = [flag for flag in option.flags if flag.startswith("--")]
            names |= {flag[2:].replace("-", "_"): option.path for flag in long}
    for section, model in sections_of(root).items():
        names |= {field: f"{section}.{field}" for field in model.model_fields}
    return names | {field: field for field in root.model_fields}


@dataclass(frozen=True)
class Reading:
    """Turns a mapping of a file into settings.

    Attributes:
        shown: the file as messages name it.
        kind: what its values are said to come from.
        problems: what is wrong is added here.
        root: what the mapping is: a Job, or a Cluster.
    """

    shown: str
    kind: SourceKind
    problems: list[Problem]
    root: type[BaseModel]

    def layer(self, entries: Mapping[str, Entry]) -> Layer:
        """Return the settings in a mapping; a null is no setting."""
        return self._layer(entries, self.root, "")

    def _layer(self, entries: Mapping[str, Entry], model: type[BaseModel], above: str) -> Layer:
        found: Layer = {}
        for key, entry in entries.items():
            if key not in model.model_fields:
                self._unknown(key, entry, model, above)
            elif entry.value.data is not None:
                found |= self._field(f"{above}{key}", entry, sections_of(model).get(key))
        return found

    def _field(self, path: str, entry: Entry, section: type[Section] | None) -> Layer:
        if section is None and path != VARIABLES:
            return {path: self._setting(entry)}
        if not isinstance(entry.value.data, dict):
            if section is not None and section.short_for and isinstance(entry.value.data, str):
                return {f"{path}.{section.short_for}": self._setting(entry)}
            self._no_section(path, entry, section)
            return {}
        if section is not None:
            return self._layer(entry.value.data, section, f"{path}.")
        given = {name: item for name, item in entry.value.data.items() if item.value.data is not None}
        return {f"{path}.{name}": self._setting(item) for name, item in given.items()}

    def _setting(self, entry: Entry) -> Setting:
        return Setting(entry.value.plain, Source(self.kind, self._at(entry)))

    def _at(self, entry: Entry) -> str:
        return f"{self.shown}:{entry.line}"

    def _no_section(self, path: str, entry: Entry, section: type[BaseModel] | None) -> None:
        example = "NAME: value" if section is None else f"{next(iter(section.model_fields))}: ..."
        self.problems.append(
            Problem(
                self._at(entry),
                f"{path} must be a mapping, not {kind_of(entry.value.plain)}",
                fix=f"write '{path.split('.')[-1]}:' and below it, indented, lines such as '{example}'",
            )
        )

    def _unknown(self, key: str, entry: Entry, model: type[BaseModel], above: str) -> None:
        what = f"unknown key {quoted(key)}" + (f" in {above[:-1]}" if above else "")
        hint = _hint(key, model, above, known_paths(self.root))
        self.problems.append(Problem(self._at(entry), what, fix=hint))


def _hint(key: str, model: type[BaseModel], above: str, places: Mapping[str, str]) -> str:
    """Say what was meant: a key of another section, one spelled nearly so, or else which ones there are."""
    normal = key.lower().replace("-", "_")
    path = places.get(normal)
    if path and normal not in model.model_fields:
        return f"did you mean {quoted(path)}?" if path.startswith(above) and above else _belongs(path)
    if above == "environment." and key.isupper():
        return _belongs(f"{VARIABLES}.{key}")
    if near := did_you_mean(key, model.model_fields):
        return near
    if far := closest(key, places):
        return f"did you mean {quoted(places[far])}?"
    return f"known here: {listed(model.model_fields, 'and')}"


def _belongs(path: str) -> str:
    *sections, key = path.split(".")
    return f"it is {path}: write {key} under {'.'.join(sections)}" if sections else f"{key} stands at the top level"


def kind_of(value: object) -> str:
    """Return what a value is in plain words: ``a list``, ``text``."""
    kinds = (
        (bool, "true or false"),
        (int | float, "a number"),
        (str, "text"),
        (list | tuple, "a list"),
        (dict, "a mapping"),
    )
    return next((word for kind, word in kinds if isinstance(value, kind)), "nothing")


def read_job_file(path: Path, cwd: Path) -> dict[str, Entry]:
    """Return the entries of a job file.

    Raises:
        JobError: it is not there, cannot be read, or is no YAML mapping.
    """
    shown = shown_path(path, cwd)
    if path.is_dir():
        raise one_of(_folder(path, shown, cwd))
    if not path.exists():
        raise one_of(Problem(shown, "there is no such job file", fix=_other_file(path, cwd)))
    return _mapping(parse_yaml(_text(path, shown), shown), shown)


def read_cluster_file(path: Path, cwd: Path) -> dict[str, Entry]:
    """Return the entries of a cluster file by name; none where there is no such file or it says nothing.

    Raises:
        JobError: it cannot be read, or is no YAML mapping.
    """
    if not path.is_file():
        return {}
    shown = shown_path(path, cwd)
    value = parse_yaml(_text(path, shown), shown)
    return {} if value is None or value.data is None else _mapping(value, shown)


def cluster_files(folder: Path, cwd: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the places of cluster files, the strongest first: the project's, then the user's."""
    yield from dict.fromkeys([folder / CLUSTER_FILE, cwd / CLUSTER_FILE])
    if own := users_folder(environ):
        yield own / CLUSTER_FILE


def users_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the user's own files; None where the environment names none."""
    config, home = environ.get("XDG_CONFIG_HOME", ""), environ.get("HOME", "")
    if config.startswith("/"):
        return Path(config) / "allranks"
    return Path(home) / ".config" / "allranks" if home.startswith("/") else None


def _mapping(value: Value | None, shown: str) -> dict[str, Entry]:
    if value is None or value.data is None:
        raise one_of(Problem(shown, "the file says nothing", why="it is empty or holds only comments", fix=_INIT))
    if not isinstance(value.data, dict):
        what = f"the file must hold keys and values, not {kind_of(value.plain)}"
        raise one_of(Problem(f"{shown}:{value.line}", what, fix=f"write lines such as 'name: value'; {_INIT}"))
    return value.data


def _folder(path: Path, shown: str, cwd: Path) -> Problem:
    inside = [entry for entry in _siblings(path) if entry.suffix in _YAML_SUFFIXES]
    if not inside:
        return Problem(shown, "this is a folder, not a job file", fix=_INIT)
    names = listed(shown_path(entry, cwd) for entry in inside[:5])
    return Problem(shown, "this is a folder, not a job file", fix=f"name the file in it: {names}")


def _other_file(path: Path, cwd: Path) -> str:
    others = [entry.name for entry in _siblings(path.parent) if entry.suffix in _YAML_SUFFIXES]
    near = closest(path.name, others) or (others[0] if len(others) == 1 else None)
    if near:
        return f"did you mean {quoted(shown_path(path.parent / near, cwd))}?"
    return f"job files there: {listed(sorted(others)[:5], 'and')}" if others else _INIT


def _siblings(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path, shown: str) -> str:
    data = _bytes(path, shown)
    if isinstance(data, JobError):
        raise data
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
    raise one_of(Problem(f"{shown}:{line}", "the file is not UTF-8", fix="save it as UTF-8; is it a text file?"))


def _bytes(path: Path, shown: str) -> bytes | JobError:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        return one_of(Problem(shown, "the file cannot be read", why=reason, fix=f"ls -l {shlex.quote(shown)}"))
    if len(data) > _LARGEST_FILE:
        return one_of(Problem(shown, "the file is larger than 256 kB", why="no job file is", fix=_INIT))
    return data
