"""``allranks check``: what is wrong with a job or its machines, before it costs GPU hours."""

from __future__ import annotations

import os
from typing import Any

import click

from allranks.cli import render
from allranks.cli.findings import show
from allranks.cli.options import JobCommand, Seconds, job_options, launch_of, load, quick_option, timeout_option
from allranks.cli.runs import comma_separated, json_option
from allranks.errors import PreflightError

#: The module that a check without a job is made for.
_NO_JOB = "allranks.selftest"


@click.command("check", cls=JobCommand)
@job_options
@quick_option
@click.option("--only", metavar="CHECKS", multiple=True, help="Only these checks, separated by commas.")
@click.option("--skip", metavar="CHECKS", multiple=True, help="Skip these checks.")
@click.option(
    "--wait",
    metavar="SECONDS",
    type=Seconds(0),
    default=60,
    show_default=True,
    help="Time to wait for the scheduler to start the check's job; 0: submit none.",
)
@timeout_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    is_quick: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    wait: float,
    timeout: float,
    as_json: bool,
    **values: Any,
) -> int:
    """Check this machine, or all nodes of a job.

    Without a job and without a job.yaml here, it checks this machine, or the cluster of --on:

    \b
    allranks check
    allranks check job.yaml --on gpu-lab
    allranks check train.py --nodes gpu1,gpu2 --full

    On a scheduler a short job collects the facts. It is cancelled if it waits too long.

    Exits with 0, or with 3 if a check failed.
    """
    from allranks.checks.preflight import preflight
    from allranks.checks.probe import folder_in
    from allranks.checks.registry import chosen_for
    from allranks.checks.waiting import Waiting
    from allranks.clusters.registry import kind_for
    from allranks.launch import submit as launching

    loaded = load(ctx, values, needs_target=False)
    has_target = any((loaded.job.script, loaded.job.module, loaded.job.binary))
    launch = launch_of(loaded)
    if not has_target:
        launch = launch._replace(job=launch.job.model_copy(update={"module": _NO_JOB}))
    kind = kind_for(loaded, os.environ)
    checks = chosen_for(launch, comma_separated(only), comma_separated(skip), is_full=not is_quick)
    plan = launching.dry_run(launch, kind)
    waiting = Waiting(wait, lambda line: render.talk(f"allranks: check: {line}")) if wait else None
    with folder_in(launch.runs_folder) as folder:
        report = preflight(checks, kind, launch, plan, folder, has_target=has_target, waiting=waiting, timeout=timeout)
    if as_json:
        render.as_json(report.to_json())
    else:
        show(report)
    return 0 if report.is_good else PreflightError.exit_code
