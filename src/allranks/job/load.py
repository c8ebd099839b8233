"""Loads a job: flags, environment, job file and cluster file become one typed, checked object."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from allranks.contract import is_secret
from allranks.errors import AllranksError
from allranks.job import sources
from allranks.job.files import cluster_files, file_layer, read_cluster_file, read_job_file
from allranks.job.options import TARGETS
from allranks.job.problems import Problem, did_you_mean, error_of, listed, quoted, shown_path
from allranks.job.sources import CHECKS_FOLDER, DEFAULT, WEBHOOK, GivenValue, Layer, ValueSource, texts_of, variables_of
from allranks.job.spec import Cluster, Job, Section
from allranks.job.values import as_name, at_commas
from allranks.job.variables import fill_secrets, scrub, secret_problems, secret_values, variable_problems
from allranks.job.yaml import Number, YamlMapping, kind_of
from allranks.system import schedulers

_Model = TypeVar("_Model", bound=Section)

_LOCAL = "local"
_KINDS = ("local", "ssh", "pdsh", *schedulers.KINDS)
_MOST_TEXT = 200
#: Numbers to write where the default is none, or 0.
_NUMBERS = {"launch.master_port": "29500", "launch.max_restarts": "3", "resources.cpus_per_node": "8"}

#: What pydantic's types of errors, or how these start, mean in plain words.
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


class LoadedJob(NamedTuple):
    """A job that is complete and checked."""

    job: Job  # What the user asks for, from all layers.
    cluster: Cluster  # Where it runs: the kind, and the cluster's own defaults (already in ``job``).
    sources: dict[str, ValueSource]  # Where each leaf of the job comes from, by path: launch.nproc_per_node.
    folder: Path  # Absolute, that relative paths in the job start from.


def load_job(
    target: Path | None,
    *,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    cwd: Path,
    needs_target: bool = True,
    typed: Collection[str] = (),
) -> LoadedJob:
    """Return the job that the user asks for.

    The first of these that gives a value counts: flag, variable, job file, cluster file, default. ``target`` is the job
    file, None where flags give script, module or binary; flags are given by path, with None for those that are not.
    ``typed`` are the words of the command line, for messages to name a flag as it was written.

    Raises:
        JobError: with everything that is wrong, each with its place. It shows no secret.
    """
    problems: list[Problem] = []
    cwd = Path(os.path.abspath(cwd))  # noqa: PTH100 - resolve() would replace links that the user sees
    layers = [
        sources.flag_layer(flags, environ, cwd, problems, typed),
        sources.environment_layer(environ, cwd, problems),
    ]
    folder = cwd
    if target is not None:
        path = cwd / target
        path = path.parent.resolve() / path.name if path.name else path.resolve()  # A link to a file stays one.
        folder = path.parent
        entries = read_job_file(path, cwd)
        layers.append(file_layer(entries, shown_path(path, cwd), "job file", problems, Job))
    requested = sources.merge(layers)
    cluster, defaults = _cluster(requested, folder, cwd, environ, problems)
    merged = fill_secrets(sources.resolved(sources.merge([requested, defaults]), cwd, environ), environ, problems)
    secrets = secret_values(variables_of(merged), environ)
    problems += [*variable_problems(merged), *_text_problems(merged), *secret_problems(merged, environ)]
    job = _validated(Job, merged, secrets, problems)
    if (needs_target and not problems) or any(target in merged for target in TARGETS):
        problems += _target_problems(merged, cwd, has_file=target is not None)
    if problems or job is None or cluster is None:
        raise error_of(*(_scrubbed(problem, secrets) for problem in problems))
    return LoadedJob(job, cluster, sources.all_sources(job.model_dump(mode="json"), merged), folder)


def _scrubbed(problem: Problem, secrets: tuple[str, ...]) -> Problem:
    texts = {name: getattr(problem, name) for name in ("what", "why", "fix")}
    return problem._replace(**{name: text and scrub(text, secrets) for name, text in texts.items()})


def _text_problems(layer: Layer) -> Iterator[Problem]:
    for path, setting in layer.items():
        if any("\0" in text for text in texts_of(setting.value)):
            why = "neither arguments nor environment variables can hold one"
            yield Problem(setting.source.where, f"{path} holds a NUL character", why=why, fix="remove it")


def _target_problems(layer: Layer, cwd: Path, *, has_file: bool) -> Iterator[Problem]:
    """Yield what is wrong with the choice of script, module or binary, of a job with a job file or without."""
    given = [target for target in TARGETS if target in layer]
    if len(given) > 1:
        where = layer[given[-1]].source.where
        what = f"{listed(given, 'and')} are given, but a job has only one of them"
        places = [f"{target} at {layer[target].source.where}" for target in given]
        yield Problem(where, what, why=listed(places, "and"), fix=f"remove {listed(given[1:])}")
    elif not given:
        why = "there is no job.yaml in this directory, and no script was given"
        write = "allranks init writes a job.yaml"
        if has_file:
            why, write = "the job file names none", "write 'script: train.py' in the job file"
        elif (cwd / "job.yml").is_file():
            why, write = "job.yaml is read by default, and here is job.yml", "name it: allranks run job.yml"
        fix = f"{write}, or allranks run train.py (or -m MODULE, --binary FILE)"
        yield Problem("", "the job has no script, module or binary", why=why, fix=fix)


def _cluster(
    requested: Layer, folder: Path, cwd: Path, environ: Mapping[str, str], problems: list[Problem]
) -> tuple[Cluster | None, Layer]:
    """Return the cluster and the defaults that it brings; ``local`` needs no entry."""
    setting = requested.get("cluster", GivenValue(_LOCAL, DEFAULT))
    if isinstance(setting.value, dict):
        what, why = "cluster cannot be a mapping", "a job names its cluster, and clusters.yaml describes that"
        fix = f"cluster: lab here, and in clusters.yaml: {{lab: {{kind: {_kind_in(setting.value)}}}}}"
        problems.append(Problem(setting.source.where, what, why=why, fix=fix))
        del requested["cluster"]
        return None, {}
    name = str(setting.value)
    entries = _entries(folder, cwd, environ)
    if name in entries:
        return _read_entry(name, *entries[name], cwd, environ, problems)
    if name == _LOCAL:
        return Cluster(kind=_LOCAL), {}
    shown, known = scrub(name, secret_values(variables_of(requested), environ)), {_LOCAL: None, **entries}
    what, why = f"there is no cluster {quoted(shown)}", f"known clusters: {listed(known, 'and')}"
    for file, others in entries.values():
        if misplaced := _misplaced(name, others):
            place = f"{shown_path(file, cwd)}:{others.lines[misplaced]}"
            fix = f"write '{shown}:' at the top level, and below it, indented, 'kind: slurm' and what belongs to it"
            problems.append(Problem(place, what, why=f"{misplaced!r} is read as the name of a cluster", fix=fix))
            return None, {}
    entry = f"{{{shown}: {{kind: slurm}}}}, or pbs, grid_engine, ssh"
    of_kind = next((other for other, (_, others) in entries.items() if _kind_of(others[other]) == shown), None)
    fix = did_you_mean(shown, known) or f"describe it in clusters.yaml: {entry}"
    if of_kind:
        fix = f"did you mean {quoted(of_kind)}? It is a cluster of kind {shown}"
    problems.append(Problem(setting.source.where, what, why=why, fix=fix))
    return None, {}


def _kind_in(value: object) -> str:
    """Return the kind that a misplaced description of a cluster names, else the most usual one."""
    kind = value.get("kind") if isinstance(value, dict) else value
    return kind if isinstance(kind, str) and kind in _KINDS else "slurm"


def _kind_of(entry: object) -> object:
    return entry.get("kind") if isinstance(entry, dict) else None


def _misplaced(name: str, entries: YamlMapping) -> str | None:
    """Return the key of a cluster file below which, or instead of which, the entry of a cluster seems to stand."""
    for key, entry in entries.items():
        inside = entry if isinstance(entry, list) else [entry]
        if key in ("kind", "cluster", "clusters") or any(isinstance(part, dict) and name in part for part in inside):
            return key
    return None


def cluster_names(folder: Path, environ: Mapping[str, str]) -> list[str]:
    """Return the clusters that a job in a directory may name; without those of an invalid file."""
    with suppress(AllranksError):
        return [_LOCAL, *_entries(folder, folder, environ)]
    return [_LOCAL]


def _entries(folder: Path, cwd: Path, environ: Mapping[str, str]) -> dict[str, tuple[Path, YamlMapping]]:
    """Return the strongest file that has an entry, and all of that file, by the entry's name."""
    found: dict[str, tuple[Path, YamlMapping]] = {}
    for path in cluster_files(folder, cwd, environ):
        entries = read_cluster_file(path, cwd)
        for name in entries:
            found.setdefault(name, (path, entries))
    return found


def _read_entry(
    name: str, file: Path, entries: YamlMapping, cwd: Path, environ: Mapping[str, str], problems: list[Problem]
) -> tuple[Cluster | None, Layer]:
    entry, shown = entries[name], shown_path(file, cwd)
    where, fix = f"{shown}:{entries.lines[name]}", f"write 'kind: {_kind_in(entry)}' below it"
    if not isinstance(entry, YamlMapping):
        what = f"the cluster {name} must be a mapping, not {kind_of(entry)}"
        problems.append(Problem(where, what, fix=f"{fix}, indented"))
        return None, {}
    layer = file_layer(entry, shown, "cluster file", problems, Cluster)
    defaults = {path: setting for path, setting in layer.items() if path != "kind"}
    checks = defaults.get(CHECKS_FOLDER)
    if checks and isinstance(checks.value, str) and not checks.value.startswith("~"):
        defaults[CHECKS_FOLDER] = checks._replace(value=str(file.parent / checks.value))
    if "kind" not in layer:
        problems.append(Problem(where, f"the cluster {name} has no kind", fix=fix))
        return None, defaults
    kind = layer["kind"].value
    if isinstance(kind, str) and kind not in _KINDS and kind not in (known := schedulers.kinds()):
        what, why = f"there is no kind of cluster {quoted(kind)}", f"the kinds are {listed(known, 'and')}"
        meant = did_you_mean(schedulers.SAME.get(kind.lower(), kind), known)
        problems.append(Problem(layer["kind"].source.where, what, why=why, fix=meant or "write kind: slurm, say"))
        return None, defaults
    return _validated(Cluster, layer, secret_values(variables_of(layer), environ), problems), defaults


def _validated(model: type[_Model], layer: Layer, secrets: tuple[str, ...], problems: list[Problem]) -> _Model | None:
    """Return the settings as a typed object, or None when some are wrong; no message shows a secret."""
    try:
        return model.model_validate(sources.nested(layer))
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
    problems += [_translated(dict(item), layer, secrets, model) for item in found]
    return None


def _translated(item: dict[str, Any], layer: Layer, secrets: tuple[str, ...], model: type[Section]) -> Problem:
    """Say in plain words what pydantic found."""
    path, setting, rest = _located(item["loc"], layer)
    value = setting.value
    for key in rest:
        value = [*at_commas(value)] if item["type"] == "literal_error" else value  # As it was split.
        value = value[key] if isinstance(value, list | tuple) and isinstance(key, int) else value
    why, fix = _rule(item, value, secrets)
    fix = fix or _suggested(item, why, path, setting.source, value, model)
    subject = "" if setting.source.kind in ("flag", "environment") else f"{path} "
    entry = f"entry {rest[0] + 1} " if rest and isinstance(rest[0], int) else ""
    what = f"{subject}{entry}cannot be {_shown(path, value, secrets)}"
    return Problem(setting.source.where, what, why=why, fix=fix)


def _located(loc: tuple[int | str, ...], layer: Layer) -> tuple[str, GivenValue, tuple[int | str, ...]]:
    """Return the setting that an error is about, and where in its value."""
    for end in range(len(loc), 0, -1):
        path = ".".join(str(key) for key in loc[:end])
        if path in layer:
            return path, layer[path], loc[end:]
    return ".".join(str(key) for key in loc), GivenValue(None, DEFAULT), ()


def _rule(item: dict[str, Any], value: object, secrets: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the rule that a value breaks, and what to write instead."""
    context = item.get("ctx", {})
    if item["type"] == "literal_error":
        choices = re.findall(r"'([^']+)'", context["expected"])
        return f"it must be {listed(choices)}", did_you_mean(str(value), choices)
    if item["type"] == "value_error":
        text = str(context["error"])
        if isinstance(value, str) and any(secret in value for secret in secrets):
            # The sentence quotes it; escaping may change its look.
            text = text.replace(repr(value), "this").replace(repr(value.strip()), "this")
    else:
        rules = (rule for kind, rule in _RULES.items() if item["type"].startswith(kind))
        limits = {name: f"{limit:g}" for name, limit in context.items() if isinstance(limit, int | float)}
        text = next(rules, "it is of the wrong kind").format(**limits)
    if item["loc"] == ("args",) and isinstance(value, dict):
        words = (f"{name if str(name).startswith('-') else f'--{name}'} {each}" for name, each in value.items())
        return text, f"write args: {' '.join(words)}"
    why, _, fix = text.rpartition("; ") if "; " in text else (text, "", "")  # A sentence of ours: the rule; the fix.
    return why[:_MOST_TEXT], fix or None


def _suggested(
    item: dict[str, Any], rule: str, path: str, source: ValueSource, value: object, model: type[Section]
) -> str | None:
    """Return what to write in place of a value, for the rules that do not say it themselves."""
    if item["type"].startswith("string_pattern"):
        near = as_name(str(value)).lstrip("_")
        return _write(path, source, near) if near else "leave it out: the job then has the name of its script"
    if rule == _RULES["string_type"]:
        return _one_text(path, source, value, in_list=len(item["loc"]) > len(path.split(".")))
    if path == "resources.gpus_per_node" and (typed := re.fullmatch(r"(?:gpu:)?(\w+):(\d+)", str(value))):
        kind, number = typed.groups()  # Slurm's a100:4 is two values here.
        if source.kind == "flag":
            return f"{source.where} {number} --gpu-type {kind}"
        return f"write gpus_per_node: {number} and gpu_type: {kind}"
    if item["type"] == "literal_error":
        choices, default = re.findall(r"'([^']+)'", item["ctx"]["expected"]), _default(model, path)
        if default is None:
            return "leave it out: allranks then chooses"
        return f"leave it out, or {_write(path, source, default if default in choices else choices[0])}"
    if rule == _RULES["tuple"]:
        return _write(path, source, f"[{', '.join(_default(model, path) or ('ONE', 'TWO'))}]")
    if rule == _RULES["bool"]:  # What is the default need not be written.
        return _write(path, source, str(not _default(model, path)).lower())
    if rule in (_RULES["int"], _RULES["float"]) or item["type"] in ("greater_than_equal", "less_than_equal"):
        default = _default(model, path)
        return _write(path, source, _NUMBERS.get(path) or (f"{default:g}" if default else "1"))
    return None


def _write(path: str, source: ValueSource, text: str) -> str:
    """Return how a value is given where the wrong one was: ``--max-restarts 3``, or ``write max_restarts: 3``."""
    if source.kind == "flag":
        return f"{source.where} {shlex.quote(text)}"
    if source.kind == "environment":
        return f"{source.where}={shlex.quote(text)}"
    return f"write {path.rpartition('.')[2]}: {text}"


def _one_text(path: str, source: ValueSource, value: Any, *, in_list: bool) -> str:
    """Return what to write where one text is needed."""
    if value is None:
        return 'remove it, or put it in quotes: "null"'
    if isinstance(value, bool):
        return f'put it in quotes: "{str(value).lower()}"'
    words = [word for word in value if isinstance(word, str)] if isinstance(value, list | tuple) else []
    if not words or len(words) < len(value) or in_list or is_secret(path):
        return "write one text, without brackets and braces"
    if path == "resources.nodes":
        return f"write hosts: [{', '.join(words)}] for these machines, over SSH"
    first = _write(path, source, words[0])
    return f"{first} and args: {shlex.join(words[1:])}" if path == "script" and words[1:] else first


def _default(model: type[Section], path: str) -> Any:
    *sections, key = path.split(".")
    for section in sections:
        model = model.sections()[section]
    return model.model_fields[key].default


def _shown(path: str, value: object, secrets: tuple[str, ...]) -> str:
    """Return a value as messages show it; a secret is never shown."""
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if is_secret(path) or path == WEBHOOK:
        return "what it is"
    text = scrub(str(value), secrets)
    return text if isinstance(value, Number) else quoted(text)
