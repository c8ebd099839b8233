"""``allranks plan``: what would be executed, and why."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import render
from allranks.cli.options import JobCommand, job_options, launch_of, load
from allranks.cli.runs import json_option
from allranks.errors import JobError, UsageError
from allranks.job.problems import printable

if TYPE_CHECKING:
    from allranks.job.load import LoadedJob
    from allranks.plan.plan import Plan


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
@click.option("--per-node", is_flag=True, help="Print the command for each node, to start the nodes by hand.")
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
    from allranks.clusters.registry import kind_for
    from allranks.launch.submit import dry_run

    loaded = load(ctx, values)
    if sources:
        _show_sources(loaded, as_json)
        return 0
    if per_node:
        from allranks.cli.node import per_node_lines  # With it come two more verbs.

        found = per_node_lines(ctx, values, loaded, kind_for(loaded, os.environ))
        if as_json:
            render.as_json(found)
            return 0
        for each in found:
            on = f" on {each['host']}" if each["host"] else ""
            render.data(f"# node {each['node']}{on}\n{each['line']}")
        return 0
    is_alone = script is not None and not (script.endswith(os.sep) or Path(script).is_dir())
    plan = dry_run(launch_of(loaded), kind_for(loaded, os.environ), standalone=is_alone)
    if script is not None:
        return _write_script(plan, Path(script)) if is_alone else _write_files(plan, Path(script))
    if as_json:
        render.as_json(plan.to_json())
        return 0
    render.data(_text(plan, loaded, verbose))
    if not verbose:
        render.talk("next: -v shows the scripts, -o DIR/ writes them; allranks run starts the job")
    return 0


def _write_script(plan: Plan, path: Path) -> int:
    """Write the one script that a scheduler takes."""
    from allranks.record.files import write_atomically

    scripts = [file for file in plan.files if file.path.startswith("script.")]
    if not scripts:
        fix = "--on a cluster with a scheduler"
        if not path.exists() and not path.suffix:
            fix = f"-o {shlex.quote(f'{path}{os.sep}')} writes all files of the plan to that directory; or {fix}"
        raise JobError(f"cluster {plan.cluster} has no batch script", fix=fix)
    write_atomically(path, scripts[0].text, 0o600)
    for note in plan.notes:
        render.talk(f"note: {note}")
    submit = shlex.join([*plan.commands[0].command[:-1], str(path)])
    render.talk(f"wrote {render.path(path.absolute())}\nnext: {submit}")
    return 0


def _write_files(plan: Plan, folder: Path) -> int:
    """Write the files of the plan as they would be in the run's directory, to be read."""
    from allranks.record.files import write_atomically

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}", why=error.strerror, fix="-o with another directory") from error
    for file in plan.files:
        write_atomically(folder / file.path, file.text, file.mode)
        render.talk(f"wrote {render.path((folder / file.path).absolute())}")
    return 0


def _show_sources(loaded: LoadedJob, as_json: bool) -> None:
    from allranks.job.variables import redacted

    values = redacted(loaded.job)
    rows = [(path, _value_at(values, path), str(source)) for path, source in loaded.sources.items()]
    if as_json:
        render.as_json({path: {"value": value, "source": source} for path, value, source in rows})
        return
    shown = ((path, "-" if value is None else printable(str(value)), source) for path, value, source in rows)
    render.data(render.table(("KEY", "VALUE", "FROM"), shown))


def _value_at(values: dict[str, Any], path: str) -> Any:
    """Return the value at a dotted path; the name of a variable is its last part, dots and all."""
    while path not in values:
        head, _, path = path.partition(".")
        values = values[head]
    return values[path]


def _text(plan: Plan, loaded: LoadedJob, verbose: bool) -> str:
    rows = [(reason.subject, printable(reason.value) or "(empty)", reason.why) for reason in plan.reasons]
    if plan.nnodes > 1:
        rows = [("ranks per node", *row[1:]) if row[0] == "ranks" else row for row in rows]
    if loaded.job.args:  # Below the script that they are passed to.
        rows.insert(1, ("arguments", printable(shlex.join(loaded.job.args)), str(loaded.sources["args"])))
    parts = [f"plan for {plan.name} on {plan.cluster}: {render.ranks(plan)}, run {plan.run_id}"]
    parts.append(render.table(("WHAT", "VALUE", "WHY"), rows))
    parts += [f"note: {note}" for note in plan.notes]
    if not verbose:
        return "\n\n".join(parts)
    for file in plan.files:
        lines = (f"  {printable(line)}".rstrip() for line in file.text.rstrip("\n").split("\n"))
        parts.append("\n".join((f"{plan.run_dir}/{file.path}:", *lines)))
    parts += [f"first, node {node.node} on {node.host}:\n  {shlex.join(node.command)}" for node in plan.before]
    parts += [f"node {node.node} on {node.host}:\n  {shlex.join(node.command)}" for node in plan.commands]
    return "\n\n".join(parts)
