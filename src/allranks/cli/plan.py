"""``allranks plan``: what would be executed, and why."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import render
from allranks.cli.options import JobCommand, job_options, launch_of, load
from allranks.cli.runs import json_option
from allranks.errors import JobError, UsageError

if TYPE_CHECKING:
    from allranks.cli.per_node import NodeLine
    from allranks.job.load import LoadedJob
    from allranks.plan.plan import Plan, PlanFile


@click.command("plan", cls=JobCommand)
@job_options
@click.option("--sources", is_flag=True, help="Show where each value of the job came from.")
@click.option("--verbose", "-v", is_flag=True, help="Show the scripts, the agents' JSON and the commands too.")
@click.option(
    "--script",
    "-o",
    "script",
    metavar="FILE|DIR",
    help="Write the batch script to FILE, for sbatch by hand; or scripts and JSON of the run to the directory DIR.",
)
@click.option("--per-node", is_flag=True, help="Show the line to type on each node, where they are started by hand.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    sources: bool,
    verbose: bool,
    script: str | None,
    per_node: bool,
    as_json: bool,
    **values: Any,
) -> int:
    """Show what would be executed for a job, and why. Nothing is started; only -o writes files.

    TARGET and the options are those of allranks run.
    """
    from allranks.clusters.launch import dry_run
    from allranks.clusters.registry import kind_for

    loaded = load(ctx, values)
    if sources:
        _show_sources(loaded, as_json)
        return 0
    if per_node:
        from allranks.cli.per_node import lines  # With it come two more verbs.

        _show_lines(lines(ctx, values, loaded, kind_for(loaded, os.environ)), as_json)
        return 0
    is_alone = script is not None and not _is_directory(script)
    plan = dry_run(launch_of(loaded), kind_for(loaded, os.environ), standalone=is_alone)
    if script is not None:
        return _write_script(plan, Path(script)) if is_alone else _write_files(plan, Path(script))
    if as_json:
        render.as_json(plan.to_json())
        return 0
    render.data(_text(plan, verbose))
    if not verbose:
        render.talk("next: -v shows the scripts, -o DIR writes them; allranks run starts the job")
    return 0


def _is_directory(path: str) -> bool:
    return path.endswith(os.sep) or Path(path).is_dir()


def _show_lines(found: list[NodeLine], as_json: bool) -> None:
    if as_json:
        render.as_json([asdict(one) for one in found])
    else:
        render.data("\n".join(map(str, found)))


def _write_script(plan: Plan, path: Path) -> int:
    """Write the one script that does it all, as a scheduler takes it."""
    from allranks.runs.files import write_whole

    scripts = [file for file in plan.files if file.path.startswith("script.")]
    if not scripts:
        raise JobError(f"cluster {plan.cluster} has no batch script", fix="--on a cluster with a scheduler")
    write_whole(path, scripts[0].text, 0o600)
    for note in plan.notes:
        render.talk(f"note: {note}")
    submit = shlex.join([*plan.commands[0].command[:-1], str(path)])
    render.talk(f"wrote {render.path(path.absolute())}\nnext: {submit}")
    return 0


def _write_files(plan: Plan, folder: Path) -> int:
    """Write the files that the run's own folder would hold of it, for a person who reads them."""
    from allranks.runs.files import write_whole

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}", why=error.strerror, fix="-o with another directory") from error
    for file in plan.files:
        write_whole(folder / file.path, file.text, file.mode)
        render.talk(f"wrote {render.path((folder / file.path).absolute())}")
    return 0


def _show_sources(loaded: LoadedJob, as_json: bool) -> None:
    from allranks.job.secrets import redacted

    values = redacted(loaded.job)
    rows = [(path, _value_at(values, path), str(source)) for path, source in loaded.sources.items()]
    if as_json:
        render.as_json({path: {"value": value, "source": source} for path, value, source in rows})
    else:
        given = ((path, "-" if value is None else render.printable(str(value)), source) for path, value, source in rows)
        render.data(render.table(("KEY", "VALUE", "FROM"), given))


def _value_at(values: dict[str, Any], path: str) -> Any:
    """Return the value at a dotted path; the name of a variable is its last part, dots and all."""
    current: Any = values
    rest = path
    while rest:
        if rest in current:
            return current[rest]
        head, _, rest = rest.partition(".")
        current = current[head]
    return current


def _text(plan: Plan, verbose: bool) -> str:
    rows = [(reason.subject, render.printable(reason.value) or "(empty)", reason.why) for reason in plan.reasons]
    parts = [f"plan for {plan.name} on {plan.cluster}: {render.ranks(plan)}, run {plan.run_id}"]
    parts.append(render.table(("WHAT", "VALUE", "WHY"), rows))
    parts += [f"note: {note}" for note in plan.notes]
    if not verbose:
        return "\n\n".join(parts)
    parts += [_file(plan, file) for file in plan.files]
    parts += [f"first, node {node.node} on {node.host}:\n  {shlex.join(node.command)}" for node in plan.before]
    parts += [f"node {node.node} on {node.host}:\n  {shlex.join(node.command)}" for node in plan.commands]
    return "\n\n".join(parts)


def _file(plan: Plan, file: PlanFile) -> str:
    lines = "\n".join(f"  {render.printable(line)}".rstrip() for line in file.text.rstrip("\n").split("\n"))
    return f"{plan.run_dir}/{file.path}:\n{lines}"
