"""Job file and cluster file: found, read, and turned into settings with their lines."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from allranks.job.options import OPTIONS
from allranks.job.problems import Problem, closest, did_you_mean, error_of, listed, quoted, shown_path
from allranks.job.sources import VARIABLES, GivenValue, Layer, SourceKind, ValueSource
from allranks.job.spec import Section
from allranks.job.yaml import INIT, YamlMapping, kind_of

_CLUSTER_FILE = "clusters.yaml"
_LARGEST_FILE = 256 * 1024
#: Keys of other tools (Accelerate, SkyPilot, TorchX, submitit, Slurm, PBS), and ours for the same.
_KEYS_OF_OTHERS = {
    **dict.fromkeys(("command", "cmd", "entrypoint", "run", "program", "training_script"), "script"),
    **dict.fromkeys(("cwd", "working_dir", "work_dir"), "workdir"),
    **dict.fromkeys(("num_nodes", "num_machines", "node_count", "select"), "resources.nodes"),
    **dict.fromkeys(("gpus", "ngpus", "num_gpus", "gres", "accelerators"), "resources.gpus_per_node"),
    **dict.fromkeys(("cpus", "ncpus", "num_cpus", "cpus_per_task"), "resources.cpus_per_node"),
    **dict.fromkeys(("walltime", "time_limit", "timeout"), "resources.time"),
    **dict.fromkeys(
        ("num_processes", "num_procs", "nproc", "ntasks", "ntasks_per_node", "tasks_per_node", "world_size", "ranks"),
        "launch.nproc_per_node",
    ),
    **dict.fromkeys(("image", "container_image"), "environment.container"),
    **dict.fromkeys(("log_dir", "output_dir"), "runs.folder"),
}


def file_layer(
    entries: YamlMapping, shown: str, kind: SourceKind, problems: list[Problem], root: type[Section]
) -> Layer:
    """Return the settings in a mapping of the file ``shown``, a job or a cluster; a null is not a setting."""

    def source(entries: YamlMapping, key: str) -> ValueSource:
        return ValueSource(kind, f"{shown}:{entries.lines[key]}")

    def read(entries: YamlMapping, model: type[Section], above: str) -> Layer:
        found: Layer = {}
        for key, value in entries.items():
            path, setting = f"{above}{key}", GivenValue(value, source(entries, key))
            section = model.sections().get(key)
            if key not in model.model_fields:
                what = f"unknown key {quoted(key)}" + (f" in {above[:-1]}" if above else "")
                problems.append(Problem(setting.source.where, what, fix=_hint(key, model, above, _known_paths(root))))
            elif value is None:
                continue
            elif section is None and path != VARIABLES:
                found[path] = setting
            elif section is not None and section.short_for and isinstance(value, str):
                found[f"{path}.{section.short_for}"] = setting
            elif not isinstance(value, YamlMapping):
                what = f"{path} must be a mapping, not {kind_of(value)}"
                example = f"{next(iter(section.model_fields))}: ..." if section else "NAME: value"
                fix = f"write '{key}:' and below it, indented, lines such as '{example}'"
                if section and section.short_for:
                    fix = f"write {key}: {get_args(section.model_fields[section.short_for].annotation)[-1]}"
                problems.append(Problem(setting.source.where, what, fix=fix))
            elif section is not None:
                found |= read(value, section, f"{path}.")
            else:
                given = {name: text for name, text in value.items() if text is not None}
                found |= {f"{path}.{name}": GivenValue(text, source(value, name)) for name, text in given.items()}
        return found

    return read(entries, root, "")


def _known_paths(root: type[Section]) -> dict[str, str]:
    """Return the paths in a file by the names that people give them: fields, and spellings of flags."""
    names: dict[str, str] = {}
    for option in OPTIONS:
        if option.path.split(".")[0] in root.model_fields:
            long = [flag for flag in option.flags if flag.startswith("--")]
            names |= {flag[2:].replace("-", "_"): option.path for flag in long}
    for section, model in root.sections().items():
        names |= {field: f"{section}.{field}" for field in model.model_fields}
    names |= {name: path for name, path in _KEYS_OF_OTHERS.items() if path.split(".")[0] in root.model_fields}
    return names | {field: field for field in root.model_fields}


def _hint(key: str, model: type[Section], above: str, places: Mapping[str, str]) -> str:
    """Say what was meant: a key of another section or tool, one spelled nearly so, or else which ones there are."""
    normal = key.lower().replace("-", "_")
    path = places.get(normal)
    if path and normal not in model.model_fields:
        return f"did you mean {quoted(path)}?" if path.rpartition(".")[0] == above[:-1] else _belongs(path)
    if above == "environment." and key.isupper():
        return _belongs(f"{VARIABLES}.{key}")
    if near := did_you_mean(key, model.model_fields):
        return near
    if far := closest(key, places):
        return f"did you mean {quoted(places[far])}?"
    return f"known here: {listed(model.model_fields, 'and')}"


def _belongs(path: str) -> str:
    section, _, key = path.rpartition(".")
    return f"it is {path}: write {key} under {section}" if section else f"{key} stands at the top level"


def read_job_file(path: Path, cwd: Path) -> YamlMapping:
    """Return the entries of a job file; JobError: it is not there, cannot be read, or is no YAML mapping."""
    shown = shown_path(path, cwd)
    if path.is_dir():
        inside = [shown_path(file, cwd) for file in _yaml_files(path)[:5]]
        fix = f"name the file in it: {listed(inside)}" if inside else INIT
        raise error_of(Problem(shown, "this is a directory, not a job file", fix=fix))
    if not path.exists():
        others = [file.name for file in _yaml_files(path.parent)]
        near = closest(path.name, others) or (others[0] if len(others) == 1 else None)
        fix = f"job files there: {listed(others[:5], 'and')}" if others else INIT
        if near:
            fix = f"did you mean {quoted(shown_path(path.parent / near, cwd))}?"
        raise error_of(Problem(shown, "there is no such job file", fix=fix))
    entries = _parsed(path, shown)
    if entries is None:
        raise error_of(Problem(shown, "the file has no keys", why="it is empty or holds only comments", fix=INIT))
    return entries


def read_cluster_file(path: Path, cwd: Path) -> YamlMapping:
    """Return the entries of a cluster file by name; none where there is no such file or it says nothing."""
    shown = shown_path(path, cwd)
    return (_parsed(path, shown) if path.is_file() else None) or YamlMapping()


def cluster_files(folder: Path, cwd: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the places of cluster files, the strongest first: the project's, then the user's."""
    yield from dict.fromkeys([folder / _CLUSTER_FILE, cwd / _CLUSTER_FILE])
    if own := users_folder(environ):
        yield own / _CLUSTER_FILE


def users_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the directory of the user's own files; None if the environment names none."""
    config, home = environ.get("XDG_CONFIG_HOME", ""), environ.get("HOME", "")
    if config.startswith("/"):
        return Path(config) / "allranks"
    return Path(home) / ".config" / "allranks" if home.startswith("/") else None


def _yaml_files(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml"))
    except OSError:
        return []


def _parsed(path: Path, shown: str) -> YamlMapping | None:
    from allranks.job.yaml_reader import parse_yaml  # It takes 30 ms, and a run without files needs none.

    return parse_yaml(_text(path, shown), shown)


def _text(path: Path, shown: str) -> str:
    problem = Problem(shown, "the file is larger than 256 kB", why="no job file is", fix=INIT)
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
        if len(data) <= _LARGEST_FILE:
            return data.decode("utf-8-sig")
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        problem = Problem(shown, "the file cannot be read", why=reason, fix=f"ls -l {shlex.quote(shown)}")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = Problem(f"{shown}:{line}", "the file is not UTF-8", fix="save it as UTF-8; is it a text file?")
    raise error_of(problem)  # Not in an except clause: the traceback would carry the text.
