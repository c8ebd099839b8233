"""``allranks resume``: another attempt of a run that has ended."""

from __future__ import annotations

import os

import click

from allranks.cli import render
from allranks.cli.run import carry_out, point_latest
from allranks.cli.runs import metric_option, plain_option, run_arguments, run_json_option, runs_folder
from allranks.errors import PreflightError
from allranks.runs.record import find
from allranks.runs.status import NOT_STARTED


@click.command("resume")
@run_arguments
@click.option("--detach", "-d", is_flag=True, help="Leave the run going and return; its id goes to stdout.")
@plain_option
@metric_option
@run_json_option
def command(
    run: str | None, folder: str | None, detach: bool, plain: bool, metrics: tuple[str, ...], as_json: bool
) -> int:
    """Start a run again that failed, was cancelled or has left to be continued: the newest here, or RUN.

    It is the same run: its directory, its script and arguments, another attempt. The training continues from its
    newest checkpoint if the script uses ctx.checkpoints(), or loads its own. Ends as allranks run does. The checks that
    allranks run does first are not done again.
    """
    from allranks.clusters.registry import load_kind
    from allranks.launch.refresh import settled
    from allranks.launch.submit import prepare_resume
    from allranks.launch.verdict import resumes_from

    found = settled(find(runs_folder(folder), run))
    kind = load_kind(found.record.kind)
    resumed, plan = prepare_resume(found, kind)
    point_latest(resumed)
    before = found.record.status
    if before.native == NOT_STARTED and before.exit_code == PreflightError.exit_code:
        refused = render.one_line(before.reason or "")
        render.talk(f"allranks: note: this run was refused before, and resume does not check again: {refused}")
    render.talk(f"allranks: {resumed.record.id}: attempt {resumed.attempt + 1}, {resumes_from(resumed)}")
    return carry_out(resumed, plan, kind, os.environ, detach=detach, plain=plain, metrics=metrics, as_json=as_json)
