"""``allranks resume``: another attempt of a run that has ended."""

from __future__ import annotations

import os

import click

from allranks.cli import render
from allranks.cli.run import carry_out, point_latest
from allranks.cli.runs import run_arguments, run_json_option, runs_folder
from allranks.runs.record import Run, find
from allranks.runs.saves import read_saves


@click.command("resume")
@run_arguments
@click.option("--detach", "-d", is_flag=True, help="Leave the run going and return; its id goes to stdout.")
@run_json_option
def command(run: str | None, runs_folder_: str | None, detach: bool, as_json: bool) -> int:
    """Start a run again that failed, was cancelled or has left to be continued: the newest here, or RUN.

    It is the same run: its folder, its script and arguments, another attempt. The training goes on from its
    newest checkpoint if the script uses ctx.checkpoints(), or loads its own. Ends as allranks run does.
    """
    from allranks.clusters import resume
    from allranks.clusters.registry import load_kind
    from allranks.clusters.settle import settled

    found = settled(find(runs_folder(runs_folder_), run))
    kind = load_kind(found.record.kind)
    resumed, plan = resume.prepare(found, kind)
    point_latest(resumed)
    render.talk(f"allranks: {resumed.record.id}: attempt {resumed.attempt + 1}, {_from_where(resumed)}")
    return carry_out(resumed, plan, kind, os.environ, detach=detach, as_json=as_json)


def _from_where(run: Run) -> str:
    """Say where the training continues, by what is noted of its checkpoints."""
    saved = [save for save in read_saves(run.folder) if save.path]
    if saved:
        return f"from step {saved[-1].step}"
    return "no checkpoint: the script starts from the beginning, unless it loads one of its own"
