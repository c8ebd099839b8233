"""``allranks test``: all ranks of a job, with a short program that proves that they can train."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import render
from allranks.cli.explain import explain
from allranks.cli.options import JobCommand, job_options, launch_of, load, quick_option, timeout_option
from allranks.cli.run import Relay, introduce
from allranks.cli.runs import json_option
from allranks.cli.trial_table import show
from allranks.errors import PreflightError
from allranks.job.units import format_count
from allranks.preflight.watcher import Watcher
from allranks.runs.trial import Who

if TYPE_CHECKING:
    from allranks.clusters.base import Started
    from allranks.plan.plan import Plan
    from allranks.preflight.judged import Part
    from allranks.preflight.trials import Trial
    from allranks.runs.record import Run


@click.command("test", cls=JobCommand)
@job_options
@quick_option
@timeout_option
@json_option
@click.pass_context
def command(ctx: click.Context, /, is_quick: bool, timeout: float, as_json: bool, **values: Any) -> int:
    """Run a short distributed training as a self-test.

    Starts all ranks as allranks run does, with the job's nodes, environment and launcher, and a program of ours
    in place of its script. It does each collective operation and compares the result with the right one,
    measures how fast all ranks and neighbouring nodes exchange data, and trains a small model, whose loss must
    be that of one process.

    \b
    allranks test --nproc-per-node 2
    allranks test job.yaml --on gpu-lab

    Ends with 0, with 3 if something was computed wrongly, and as allranks run does if the run failed.
    """
    from allranks.clusters.registry import kind_for
    from allranks.preflight.judged import judged
    from allranks.preflight.trials import run_trial

    loaded = load(ctx, values, needs_target=False)
    args = ("--timeout", f"{timeout:g}", *(() if is_quick else ("--full",)))
    relay = Relay(loaded.job.launch.stop_timeout)
    trial = run_trial(launch_of(loaded), kind_for(loaded, os.environ), args, watcher=_Shown(relay))
    parts = judged(trial)
    if as_json:
        render.as_json(_to_json(trial, parts))
    else:
        show(trial, parts)
    return _conclude(trial, parts)


class _Shown(Watcher):
    """Tells what goes on, and passes on the signals that this command gets."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def interrupted(self) -> int:
        return self._relay.interrupted()

    def attach(self, run: Run, plan: Plan, started: Started) -> None:
        introduce(plan, run)
        self._relay.attach(started, run)

    def news(self, run: Run, lines: Sequence[str]) -> None:
        for line in lines:
            render.talk(f"allranks: {run.record.id}: {render.one_line(line)}")


def _to_json(trial: Trial, parts: Sequence[Part]) -> dict[str, Any]:
    status = trial.run.record.status
    return {
        "good": trial.has_succeeded and not any(part.wrong for part in parts),
        "run": trial.run.record.id,
        "status": status.to_json(),
        "ranks": [asdict(who) for who in trial.of(Who)],
        "parts": [part.to_json() for part in parts if part.kind != "ranks" or part.wrong],
    }


def _conclude(trial: Trial, parts: Sequence[Part]) -> int:
    run, status = trial.run, trial.run.record.status
    wrong = [part for part in parts if part.wrong]
    if wrong:
        render.error(_wrong(trial, wrong))
        return PreflightError.exit_code
    if not trial.has_succeeded:
        from allranks.preflight.judged import where

        if told := where(trial):
            render.talk(f"allranks: {run.record.id}: it ended with {told}")
        render.error(explain(run))
        return status.exit_code or 1
    took = f" in {render.seconds(status.ended - status.started)}" if status.ended and status.started else ""
    ranks = format_count(len(trial.of(Who)), "rank")
    render.talk(f"allranks: {run.record.id}: all is right on {ranks}{took}")
    return 0


def _wrong(trial: Trial, wrong: Sequence[Part]) -> PreflightError:
    more = f", and {format_count(len(wrong) - 1, 'other part')} of the test" if len(wrong) > 1 else ""
    finds = "finds the node at fault" if len({*trial.hosts.values()}) > 1 else "looks at all that the machine has"
    return PreflightError(
        f"{trial.run.record.id}: {wrong[0].name}{more} went wrong",
        why=wrong[0].wrong,
        fix=f"allranks check --full, with the same job, {finds}",
        see=render.path(trial.run.attempt_folder),
    )
