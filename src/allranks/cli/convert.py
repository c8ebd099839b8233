"""``allranks convert``: job files from launch scripts that were written by hand."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import render
from allranks.cli.options import ScriptCommand, script_args
from allranks.convert.draft import Given
from allranks.errors import AllranksError, LaunchError, UsageError
from allranks.job.problems import listed

if TYPE_CHECKING:
    from allranks.convert.compare import Verification
    from allranks.convert.draft import Draft
    from allranks.plan.plan import Plan

    #: The drafts that one job file is for, each with the flags that make it of the first one.
    Group = Sequence[tuple[Draft, list[str]]]

_JOB, _CLUSTERS = "job.yaml", "clusters.yaml"


@click.command("convert", cls=ScriptCommand)
@click.argument("files", nargs=-1, metavar="FILE…")
@click.option("--output", "-o", metavar="DIR", help="Write the job file into this directory. Default: to stdout.")
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@click.option(
    "--verify", is_flag=True, help="Run the script in a sandbox, and compare what it and the job would start."
)
@click.option("--json", "as_json", is_flag=True, help="With --verify: write what it finds, and the job files, as JSON.")
@click.pass_context
def command(
    ctx: click.Context, files: tuple[str, ...], output: str | None, force: bool, verify: bool, as_json: bool
) -> int:
    """Turn sbatch, PBS, Grid Engine and shell scripts that start PyTorch into a job file.

    \b
    allranks convert train.sbatch          prints the job file
    allranks convert train.sbatch -o .     writes job.yaml, and clusters.yaml if it needs one
    allranks convert small.sbatch large.sbatch -o jobs
    allranks convert train.sh -- 0.1 b     with the arguments that the script is run with

    Reads the scripts, and runs nothing of them without --verify. Each value has a comment that says where it came from.
    What was kept, left out, changed because it was a fault, and not taken over is said on stderr. Scripts that differ
    in numbers of nodes, GPUs and the like become one job file, and the flags for each are printed.

    --verify runs each script, and the plan of its job, in a sandbox without network, in which nothing that they write
    is kept, and srun, torchrun, ssh and all other commands that start something only record it. Ranks, hosts,
    directory, interpreter, program, arguments and environment are compared.

    Exits with 1 if a job file does not load or cannot be planned, an argument's value is not known, or --verify finds a
    difference that convert has not named.
    """
    from allranks.convert.convert import drafts_of
    from allranks.convert.write import job_text, report, together

    if as_json and not verify:
        raise UsageError("--json needs --verify", why="it reports what --verify finds", fix="add --verify")
    texts = _read(files)
    groups = together([draft for name, text in texts.items() for draft in drafts_of(name, text, script_args(ctx))])
    if output is None and len(groups) > 1:
        raise UsageError(
            f"these scripts need {len(groups)} job files",
            why="they start different trainings: " + ", ".join(group[0][0].path for group in groups),
            fix="-o DIR writes all of them",
        )
    names = [_JOB] if len(groups) == 1 else _names([group[0][0] for group in groups])
    folder = Path(output or ".")
    found: dict[str, str] = {}
    for name, ((draft, _), *others) in zip(names, groups, strict=True):
        if folder.resolve() != Path.cwd().resolve():
            _rebase(draft, folder)
        found[name] = job_text(draft, name, others)
    kinds = sorted({str(draft.get("cluster")) for ((draft, _), *_) in groups if draft.get("cluster")})
    clusters = _entries(kinds, folder)
    if output is not None:
        clusters = _write(folder, found, clusters, kinds, force=force)
    is_done = True
    results: list[dict[str, object]] = []
    for name, group in zip(names, groups, strict=True):
        draft = group[0][0]
        render.talk(f"allranks: convert: {render.one_line(draft.path)}")
        for line in report(draft):
            render.talk(line)
        works, verified = _tried(name, found[name], group, texts if verify else {}, folder, kinds)
        results += verified
        is_done = is_done and works and not draft.incomplete
        _show_others(name, group)
    if as_json:
        render.as_json({"verified": is_done, "job_files": found, "scripts": results})
    elif output is None:
        render.data(next(iter(found.values())).rstrip("\n"))
    drafts = [draft for group in groups for draft, _ in group]
    for name in dict.fromkeys(name for draft in drafts for name in draft.secrets if not os.environ.get(name)):
        render.talk(f"next: export {name}=...")
    if clusters:
        render.talk(f"next: {'add this to' if output else 'beside it, write'} {_CLUSTERS}:\n{clusters.rstrip()}")
    elif output is not None:
        first, path = groups[0][0][0], render.path((folder / names[0]).absolute())
        render.talk(f"next: {first.command(path) if first.node else f'allranks plan {path}'}")
    return int(not is_done)


def _read(files: Sequence[str]) -> dict[str, bytes]:
    """Return the content of each file."""
    from allranks.lint.files import read

    if not files:
        raise UsageError("no file to convert", fix="allranks convert train.sbatch")
    try:
        return {name: read(Path(name)) for name in files}
    except UsageError as unread:
        raise UsageError(unread.what, why=unread.why, fix="allranks convert FILE…") from unread


def _tried(
    name: str, text: str, group: Group, scripts: Mapping[str, bytes], folder: Path, kinds: list[str]
) -> tuple[bool, list[dict[str, object]]]:
    """Plan a job file, and verify it for each of its scripts that is given; return whether it works, and the results.

    Raises:
        LaunchError: there can be no sandbox here.
    """
    from allranks.convert.sandbox import SandboxError

    works, results = True, list[dict[str, object]]()
    each = group[0][0]
    try:
        _planned(text, each, folder, kinds, [])
        for each, flags in group if scripts else ():
            plan = _planned(text, each, folder, kinds, flags, whole=True)
            verified = _verify(each, scripts[each.path], plan)
            results.append({"file": each.path, "job_file": name, **_as_data(verified)})
            works = verified.is_equal and works
    except SandboxError as error:
        raise LaunchError(
            "--verify cannot make a sandbox here, and runs no script without one",
            why=str(error),
            fix="where users may make namespaces: unshare --user --map-root-user --mount --pid --net true",
        ) from error
    except AllranksError as error:
        works = False
        results.append({"file": each.path, "job_file": name, "error": error.in_a_line})
        render.talk(f"{name} does not work yet: {error.in_a_line}" + (f"\n  fix: {error.fix}" if error.fix else ""))
        _show_missing(each, ["--verify"] if scripts else [])
    return works, results


def _show_others(name: str, group: Group) -> None:
    """Show what is to be known of the other scripts of a job file, and the command that is each of them."""
    from allranks.convert.write import place_of

    (first, _), *others = group
    said = {note.what for note in first.notes}
    for other, flags in others:
        for note in other.notes:
            if note.kind != "left out" and note.what not in said:
                render.talk(f"{note.kind}: {place_of(other, note.line)}: {note.what}")
        render.talk(f"{render.one_line(other.path)}: {other.command(name, flags)}")


def _names(drafts: list[Draft]) -> list[str]:
    """Return a file name for each job, of its first script."""
    found: list[str] = []
    for draft in drafts:
        stem, number = Path(draft.path).stem, 1
        name = f"{stem}.yaml"
        while name in found:
            name, number = f"{stem}-{number}.yaml", number + 1
        found.append(name)
    return found


def _rebase(draft: Draft, folder: Path) -> None:
    """Have paths start where the command was typed, which is where scripts are submitted: the job file is elsewhere."""
    for path in ("workdir", "environment.venv", "resources.hostfile"):
        given = draft.get(path) or ("." if path == "workdir" else None)
        if given and not given.startswith(("/", "~")):
            draft.values[path] = replace(
                draft.values.get(path, Given("", 0, "where this command was typed")),
                value=os.path.relpath(Path.cwd() / given, folder.absolute()),
            )


def _entries(kinds: list[str], folder: Path) -> str:
    """Return the entries of a cluster file for kinds that none describes."""
    from allranks.job.load import cluster_names

    known = cluster_names(folder.absolute(), os.environ)
    return "".join(f"{kind}:\n  kind: {kind}\n" for kind in kinds if kind not in known)


def _write(folder: Path, found: dict[str, str], clusters: str, kinds: list[str], *, force: bool) -> str:
    """Write the job files, and the cluster file if there is none; return the entries that are left to write."""
    there = [str(folder / name) for name in found if (folder / name).exists()]
    if there and not force:
        raise UsageError(f"{listed(there, 'and')} exist{'s' * (len(there) == 1)} already", fix="--force overwrites")
    path = folder / _CLUSTERS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in found.items():
            (folder / name).write_text(text, encoding="utf-8")
            render.talk(f"wrote {render.path((folder / name).absolute())}")
        if clusters and not path.exists():
            path.write_text(clusters, encoding="utf-8")
            render.talk(f"wrote {render.path(path.absolute())}")
    except OSError as error:
        raise UsageError(f"cannot write into {folder}", why=error.strerror, fix="-o with another directory") from error
    return _entries(kinds, folder)


def _planned(text: str, draft: Draft, folder: Path, kinds: list[str], flags: list[str], *, whole: bool = False) -> Plan:
    """Load and plan a job as ``allranks plan`` does, from a copy; ``flags`` are those of its command.

    Args:
        whole: whether the plan is to be of the node that the script starts, not of a single one like it.

    Raises:
        AllranksError: what is wrong with it.
    """
    from allranks.cli.options import launch_of
    from allranks.clusters.registry import kind_for
    from allranks.job.files import read_job_file
    from allranks.job.load import load_job
    from allranks.job.options import OPTIONS
    from allranks.launch.submit import dry_run

    secrets = dict.fromkeys(draft.secrets, "x" * 16)
    paths = {"--nodes": "resources.nodes", **{option.flags[0]: option.path for option in OPTIONS if option.flags}}
    values: dict[str, object] = {paths[name]: value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    node = re.search(r"--node-rank (\d+)", draft.node)
    if draft.node and not whole:
        values["resources.nodes"] = "1"  # Of which each is started for itself.
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / _JOB).write_text(text, encoding="utf-8")
        values |= _paths_in(read_job_file(place / _JOB, Path.cwd()), folder)
        (place / _CLUSTERS).write_text("".join(f"{kind}: {{kind: {kind}}}\n" for kind in kinds), encoding="utf-8")
        if draft.kind == "pbs":  # Else the commands of a PBS would have to be here.
            (place / _CLUSTERS).write_text("pbs: {kind: pbs, scheduler: {flavour: openpbs}}\n", encoding="utf-8")
        loaded = load_job(place / _JOB, flags=values, environ={**os.environ, **secrets}, cwd=Path.cwd())
        launch = launch_of(loaded)
        if draft.node and whole:
            launch = launch._replace(node_rank=int(node[1]) if node else 0)
        return dry_run(launch, kind_for(loaded, os.environ))


def _paths_in(job: dict[str, Any], folder: Path) -> dict[str, object]:
    """Return the paths that a job file has, or its default, as they are when it lies in a directory."""
    found: dict[str, object] = {}
    for path, default in (("workdir", "."), ("resources.hostfile", None), ("environment.venv", None)):
        *above, key = path.split(".")
        entries = job.get(above[0]) if above else job
        given = entries.get(key, default) if isinstance(entries, dict) else None
        if isinstance(given, str) and not given.startswith("~"):
            found[path] = str(folder.absolute() / given)
    return found


def _as_data(found: Verification) -> dict[str, object]:
    """Return what a comparison found as plain data."""
    differences = [
        {"what": each.what, "script": each.old, "job": each.new, "wanted": bool(each.why), "why": each.why or None}
        for each in found.differences
    ]
    what = {"verified": found.is_equal, "ranks": found.ranks, "equal": found.equal, "differences": differences}
    return {**what, "cause": found.cause or None}


def _verify(draft: Draft, data: bytes, plan: Plan) -> Verification:
    """Compare what a script and its job start, and show that."""
    from allranks.convert.verify import verify

    found = verify(draft, data, plan, os.environ, Path.cwd())
    render.talk(f"{render.one_line(draft.path)}: {found.title}")
    for line in found.lines():
        render.talk(line)
    if found.fix:
        render.talk(f"  fix: {found.fix}")
    _show_missing(draft, ["--verify"])
    return found


def _show_missing(draft: Draft, flags: Sequence[str]) -> None:
    """Show the arguments that a script reads and is not given, and how they are given."""
    from allranks.convert.unmet import unmet_arguments

    if missing := unmet_arguments(draft):
        names = (f"VALUE{name[1:]}" for name in missing)
        typed = shlex.join(["allranks", "convert", draft.path, *flags, "--", *draft.arguments, *names])
        render.talk(f"note: {render.one_line(draft.path)} was read without its arguments {listed(missing, 'and')}")
        render.talk(f"  fix: {typed}")
