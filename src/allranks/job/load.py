"""Loads a job: flags, environment, job file and cluster file become one typed, checked object."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from allranks.errors import AllranksError
from allranks.job.checks import target_problems, text_problems, unknown_cluster, validated
from allranks.job.files import (
    Reading,
    cluster_files,
    kind_of,
    read_cluster_file,
    read_job_file,
)
from allranks.job.given import environment_layer, fill_secrets, flag_layer, resolved
from allranks.job.leaks import secret_problems
from allranks.job.problems import Problem, error_of, shown_path
from allranks.job.secrets import scrub, secret_values
from allranks.job.sources import CHECKS_FOLDER, Layer, Setting, Source, all_sources, merge, variables_of
from allranks.job.spec import Cluster, Job
from allranks.job.variables import variable_problems
from allranks.job.yaml import Entry

__all__ = ["LoadedJob", "load_job"]

_LOCAL = "local"


@dataclass(frozen=True)
class LoadedJob:
    """A job that is complete and checked.

    Attributes:
        job: what the user asks for, from all layers.
        cluster: where it runs: the kind, and the cluster's own defaults (already in ``job``).
        sources: where each leaf of the job comes from, by path: ``launch.nproc_per_node``,
            ``environment.variables.NCCL_DEBUG``.
        folder: absolute folder that relative paths in the job start from.
        job_file: the job file, if there is one.
    """

    job: Job
    cluster: Cluster
    sources: dict[str, Source]
    folder: Path
    job_file: Path | None


@dataclass(frozen=True)
class _Entry:
    """A cluster's entry, and the file that it stands in."""

    shown: str
    entry: Entry
    folder: Path


def load_job(
    target: Path | None,
    *,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    cwd: Path,
    needs_target: bool = True,
) -> LoadedJob:
    """Return the job that the user asks for.

    The first of these that gives a value counts: flag, variable, job file, cluster file, default.

    Args:
        target: the job file; None where flags give script, module or binary.
        flags: values of flags by path (see ``options.py``); None means not given.
        environ: the calling environment.
        cwd: the folder that the command was typed in.
        needs_target: whether it must say what to run.

    Raises:
        JobError: with everything that is wrong, each with its place. It shows no secret.
    """
    problems: list[Problem] = []
    cwd = Path(os.path.abspath(cwd))  # noqa: PTH100 - resolve() would replace links that the user sees
    job_file = _located(target, cwd) if target is not None else None
    folder = job_file.parent if job_file else cwd
    given = merge([flag_layer(flags, environ, cwd, problems), environment_layer(environ, cwd, problems)])
    asked = merge([given, _file_layer(job_file, cwd, problems)])
    cluster, defaults = _cluster(asked, folder, cwd, environ, problems)
    merged = fill_secrets(resolved(merge([asked, defaults]), cwd, environ), environ, problems)
    job = _checked(merged, environ, problems, needs_target, has_file=job_file is not None)
    if problems or job is None or cluster is None:
        raise error_of(_scrubbed(problems, secret_values(variables_of(merged), environ)))
    return LoadedJob(job, cluster, all_sources(job.model_dump(mode="json"), merged), folder, job_file)


def _located(target: Path, cwd: Path) -> Path:
    """Return the absolute path of the job file; a link to a file stays, so that its folder is the link's."""
    path = cwd / target
    return path.parent.resolve() / path.name if path.name else path.resolve()


def _file_layer(job_file: Path | None, cwd: Path, problems: list[Problem]) -> Layer:
    if job_file is None:
        return {}
    reading = Reading(shown_path(job_file, cwd), "job file", problems, Job)
    return reading.layer(read_job_file(job_file, cwd))


def _checked(
    merged: Layer, environ: Mapping[str, str], problems: list[Problem], needs_target: bool, *, has_file: bool
) -> Job | None:
    problems += [*variable_problems(merged), *text_problems(merged), *secret_problems(merged, environ)]
    job = validated(Job, merged, secret_values(variables_of(merged), environ), problems)
    if (needs_target and not problems) or any(target in merged for target in ("script", "module", "binary")):
        problems += target_problems(merged, has_file=has_file)
    return job


def _scrubbed(problems: list[Problem], secrets: tuple[str, ...]) -> list[Problem]:
    """Keep secrets out of messages, wherever in the job their text stands."""

    def clean(text: str | None) -> str | None:
        return scrub(text, secrets) if text else text

    return [
        replace(item, what=scrub(item.what, secrets), why=clean(item.why), fix=clean(item.fix)) for item in problems
    ]


def _cluster(
    asked: Layer, folder: Path, cwd: Path, environ: Mapping[str, str], problems: list[Problem]
) -> tuple[Cluster | None, Layer]:
    """Return the cluster and the defaults that it brings; ``local`` needs no entry."""
    setting = asked.get("cluster", Setting(_LOCAL, Source("default")))
    name = str(setting.value)
    entries = _entries(folder, cwd, environ)
    if name in entries:
        return _read_entry(name, entries[name], environ, problems)
    if name != _LOCAL:
        shown = scrub(name, secret_values(variables_of(asked), environ))
        problems.append(unknown_cluster(shown, setting, {_LOCAL: None, **entries}))
        return None, {}
    return Cluster(kind=_LOCAL), {}


def cluster_names(folder: Path, environ: Mapping[str, str]) -> list[str]:
    """Return the clusters that a job in a folder may name; without those of a file that is wrong."""
    with suppress(AllranksError):
        return ["local", *_entries(folder, folder, environ)]
    return ["local"]


def _entries(folder: Path, cwd: Path, environ: Mapping[str, str]) -> dict[str, _Entry]:
    """Return all entries by name; of those with one name, the one from the strongest file."""
    found: dict[str, _Entry] = {}
    for path in cluster_files(folder, cwd, environ):
        shown = shown_path(path, cwd)
        for name, entry in read_cluster_file(path, cwd).items():
            found.setdefault(name, _Entry(shown, entry, path.parent))
    return found


def _read_entry(
    name: str, found: _Entry, environ: Mapping[str, str], problems: list[Problem]
) -> tuple[Cluster | None, Layer]:
    entry, where = found.entry, f"{found.shown}:{found.entry.line}"
    if not isinstance(entry.value.data, dict):
        what = f"the cluster {name} must be a mapping, not {kind_of(entry.value.plain)}"
        problems.append(Problem(where, what, fix="write 'kind: local' below it, indented"))
        return None, {}
    layer = Reading(found.shown, "cluster file", problems, Cluster).layer(entry.value.data)
    defaults = _based({path: setting for path, setting in layer.items() if path != "kind"}, found.folder)
    if "kind" not in layer:
        problems.append(Problem(where, f"the cluster {name} has no kind", fix="write 'kind: local' below it"))
        return None, defaults
    return validated(Cluster, layer, secret_values(variables_of(layer), environ), problems), defaults


def _based(layer: Layer, folder: Path) -> Layer:
    """Return the settings of a file in ``folder``, which the path in them is relative to."""
    setting = layer.get(CHECKS_FOLDER)
    if setting is None or not isinstance(setting.value, str) or setting.value.startswith("~"):
        return layer
    return {**layer, CHECKS_FOLDER: replace(setting, value=str(folder / setting.value))}
