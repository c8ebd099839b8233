"""``allranks check``: what is wrong with a job or its machines, before it costs GPU hours."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import render
from allranks.cli.checked import show
from allranks.cli.options import JobCommand, Seconds, job_options, launch_of, load, quick_option, timeout_option
from allranks.cli.runs import json_option
from allranks.errors import PreflightError

if TYPE_CHECKING:
    from allranks.job.load import LoadedJob

#: What a check without a job is made for.
_NOTHING = "allranks.trial"


@click.command("check", cls=JobCommand)
@job_options
@quick_option
@click.option("--only", metavar="CHECKS", multiple=True, help="These checks alone: names, with commas between them.")
@click.option("--skip", metavar="CHECKS", multiple=True, help="Leave these checks out.")
@click.option(
    "--wait",
    metavar="SECONDS",
    type=Seconds(0),
    default=60,
    show_default=True,
    help="How long to wait until a scheduler gives nodes to look at; 0: ask for none.",
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
    """Check this machine, or all that a job needs, on every node.

    Without a job, and without a job.yaml here, it looks at this machine, or with --on at a cluster's:

    \b
    allranks check
    allranks check job.yaml --on gpu-lab
    allranks check train.py --nodes gpu1,gpu2 --full

    A scheduler is asked for nodes by a short job, which is cancelled when it has waited for too long.

    Ends with 0, or with 3 if something cannot work.
    """
    from allranks.clusters import launch as launching
    from allranks.clusters.registry import kind_for
    from allranks.preflight.looking import folder_in
    from allranks.preflight.preflight import preflight
    from allranks.preflight.site import chosen_for
    from allranks.preflight.waiting import Waiting

    loaded = load(ctx, values, needs_target=False)
    has_target = _has_target(loaded)
    launch = launch_of(loaded)
    if not has_target:
        launch = replace(launch, job=launch.job.model_copy(update={"module": _NOTHING}))
    kind = kind_for(loaded, os.environ)
    checks = chosen_for(launch, _names(only), _names(skip), is_full=not is_quick)
    plan = launching.dry_run(launch, kind)
    with folder_in(launch.runs_folder) as folder:
        report = preflight(
            checks,
            kind,
            launch,
            plan,
            folder,
            has_target=has_target,
            waiting=Waiting(wait, _tell) if wait else None,
            timeout=timeout,
        )
    if as_json:
        render.as_json(report.to_json())
    else:
        show(report)
    return 0 if report.is_good else PreflightError.exit_code


def _tell(line: str) -> None:
    render.talk(f"allranks: check: {line}")


def _has_target(loaded: LoadedJob) -> bool:
    return any((loaded.job.script, loaded.job.module, loaded.job.binary))


def _names(words: tuple[str, ...]) -> list[str]:
    return [name.strip() for word in words for name in word.split(",") if name.strip()]
