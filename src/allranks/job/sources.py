"""Where the values of a job come from: flags, environment and files, and which of them counts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from allranks import contract
from allranks.job.options import LOG_LEVEL_PATH, OPTIONS, TARGET_FLAGS, TARGETS
from allranks.job.problems import Problem, did_you_mean, quoted

SourceKind: TypeAlias = Literal["flag", "environment", "job file", "cluster file", "default"]

#: Variables are merged name by name, each with a source of its own: ``environment.variables.NCCL_DEBUG``.
VARIABLES = "environment.variables"
#: A secret, which a flag would show to every user of the machine: a variable or a file gives it.
WEBHOOK = "notify.webhook"
#: The one path of a cluster file: it is relative to that file, whatever job runs on that cluster.
CHECKS_FOLDER = "checks.folder"

_LEVELS = ("DEBUG", "INFO", "WARNING", "WARN", "ERROR", "CRITICAL", "FATAL", "NOTSET", "TRACE", "OFF")

#: Paths that are relative to where the command was typed, if they are given on the command line.
_PATHS = ("workdir", "runs.folder", "environment.venv")

#: Values that start with a path, in which ``~`` is expanded.
_HOME_PATHS = (*_PATHS, "script", "binary", "environment.conda", "environment.python", CHECKS_FOLDER)

#: Variables of a rank that describe its own run, not a run that it starts.
_OF_THE_RUN = {"MASTER_ADDR", "MASTER_PORT", contract.BACKEND, contract.NOTIFY_WEBHOOK}


class ValueSource(NamedTuple):
    """Where a value comes from: the layer, and the place in it."""

    kind: SourceKind
    where: str = ""  # --nproc-per-node, NPROC_PER_NODE, job.yaml:7; empty for defaults.

    def __str__(self) -> str:
        """Write it as in ``job file job.yaml:7``."""
        return f"{self.kind} {self.where}".rstrip()


DEFAULT = ValueSource("default")


class GivenValue(NamedTuple):
    """A value as it was given, and where."""

    value: Any
    source: ValueSource


#: Settings by their path in the job: ``launch.nproc_per_node``, ``environment.variables.NCCL_DEBUG``.
Layer: TypeAlias = dict[str, GivenValue]


def flag_layer(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    cwd: Path,
    problems: list[Problem],
    typed: Collection[str] = (),
) -> Layer:
    """Return the settings of flags by path; a flag that is None was not given. ``typed`` are the words as typed."""
    options, names = {option.path: option for option in OPTIONS}, {word.partition("=")[0] for word in typed}
    found: Layer = {}
    for path, value in flags.items():
        if value is None or value == ():
            continue
        spelling = TARGET_FLAGS.get(path) or (options[path].off_flag if value is False else "")
        if not spelling:  # Of --nodes and --nnodes, say, the one that was typed.
            flags_of = options[path].flags
            spelling = next((flag for flag in flags_of if flag in names), flags_of[0])
        source = ValueSource("flag", spelling)
        if path == VARIABLES:
            found |= _variables(value, environ, source, problems)
        else:
            found |= _settings(path, value, source, cwd, problems)
    return found


def environment_layer(environ: Mapping[str, str], cwd: Path, problems: list[Problem]) -> Layer:
    """Return the settings of environment variables; one that is empty is not given."""
    inside = contract.RUN_ID in environ
    found: Layer = {}
    readers = {WEBHOOK: (contract.NOTIFY_WEBHOOK,), **{option.path: option.variables for option in OPTIONS}}
    for path, names in readers.items():
        given = (name for name in names if environ.get(name) and not (inside and name in _OF_THE_RUN))
        if name := next(given, None):
            found |= _settings(path, environ[name], ValueSource("environment", name), cwd, problems)
    return found


def _settings(path: str, value: Any, source: ValueSource, cwd: Path, problems: list[Problem]) -> Layer:
    if path == LOG_LEVEL_PATH:
        level = str(value).strip().upper()
        if source.kind == "flag" and level not in _LEVELS:
            hint = did_you_mean(level, _LEVELS) or "write DEBUG, or leave it out"
            problems.append(Problem(source.where, f"invalid log level: {quoted(str(value))}", fix=hint))
        return {"debug": GivenValue(True, source)} if level == "DEBUG" else {}
    is_path = path in _PATHS or (path == "environment.conda" and "/" in str(value))
    if is_path and not str(value).startswith("~"):
        value = str(cwd / str(value))
    return {path: GivenValue(value, source)}


def _variables(pairs: Iterable[str], environ: Mapping[str, str], source: ValueSource, problems: list[Problem]) -> Layer:
    found: Layer = {}
    for pair in pairs:
        name, given, value = pair.partition("=")
        if given or name in environ:
            found[f"{VARIABLES}.{name}"] = GivenValue(value if given else environ[name], source)
        else:
            fix = f"export it, or write {source.where} NAME=VALUE"
            problems.append(Problem(source.where, f"{quoted(name)} is not set here", fix=fix))
    return found


def resolved(layer: Layer, cwd: Path, environ: Mapping[str, str]) -> Layer:
    """Return the settings with ``~`` expanded, and with the absolute path of a script that was typed elsewhere.

    A script is relative to the working directory, but one on the command line is relative to where it was typed.
    """
    home = environ.get("HOME", "")
    found = {
        path: setting._replace(value=_at_home(path, setting.value, home)) if path in _HOME_PATHS else setting
        for path, setting in layer.items()
    }
    script, workdir = found.get("script"), found.get("workdir")
    if script and workdir and script.source.kind == "flag" and workdir.value != str(cwd):
        found["script"] = script._replace(value=str(cwd / str(script.value)))
    return found


def _at_home(path: str, value: Any, home: str) -> Any:
    """Expand ``~`` and ``~name`` as a shell does; of a command line, in its first word."""
    if isinstance(value, list | tuple):
        return [_at_home("", value[0], home), *value[1:]] if value else value
    if not isinstance(value, str) or not value.startswith("~"):
        return value
    user, slash, rest = value.partition("/")
    found = home if user == "~" and home else os.path.expanduser(user)  # noqa: PTH111 - may be no user's
    # Text of a command line is split into words later: a home with a space stays one.
    return (shlex.quote(found) if path == "environment.python" and found != user else found) + slash + rest


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
        # The name of a variable is one key, also with dots in it.
        *sections, leaf = path.split(".", 2) if path.startswith(f"{VARIABLES}.") else path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = setting.value
    return tree


def variables_of(layer: Layer) -> dict[str, Any]:
    """Return the environment variables in a layer by name."""
    prefix = f"{VARIABLES}."
    return {path[len(prefix) :]: item.value for path, item in layer.items() if path.startswith(prefix)}


def texts_of(value: object) -> Iterator[str]:
    """Yield the texts in a setting's value."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)
    elif isinstance(value, dict):
        yield from texts_of([*value.keys(), *value.values()])
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def all_sources(data: Mapping[str, Any], merged: Layer, prefix: str = "") -> dict[str, ValueSource]:
    """Return the source of every leaf of a dumped job by its path; a variable is a leaf, and so is a list."""
    found: dict[str, ValueSource] = {}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= all_sources(value, merged, f"{path}.")
        else:
            found[path] = merged[path].source if path in merged else DEFAULT
    return found
