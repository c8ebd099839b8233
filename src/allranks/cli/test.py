"""``allranks test``: all ranks of a job, with a short program that proves that they can train."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from allranks.checks.waiting import Watcher
from allranks.cli import render
from allranks.cli.failure import explain
from allranks.cli.options import JobCommand, job_options, launch_of, load, quick_option, timeout_option
from allranks.cli.run import Relay, introduce
from allranks.cli.runs import json_option
from allranks.errors import PreflightError
from allranks.job.units import format_count, format_seconds, format_size
from allranks.record.selftest import RankInfo

if TYPE_CHECKING:
    from allranks.checks.model import Trial
    from allranks.checks.selftest import PartResult
    from allranks.clusters.base import Started
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run

#: Up to how many ranks, and links between them, each has a line of its own.
_FEW = 16


@click.command("test", cls=JobCommand)
@job_options
@quick_option
@timeout_option
@json_option
@click.pass_context
def command(ctx: click.Context, /, is_quick: bool, timeout: float, as_json: bool, **values: Any) -> int:
    """Run a short distributed training as a self-test.

    Starts all ranks as allranks run does, with the job's nodes, environment and launcher, and a program of ours
    instead of its script. It does each collective operation and compares the result with the right one,
    measures how fast all ranks and neighbouring nodes exchange data, and trains a small model, whose loss must
    be that of one process.

    \b
    allranks test --nproc-per-node 2
    allranks test job.yaml --on gpu-lab

    Exits with 0, with 3 if a result is wrong, and as allranks run does if the run failed.
    """
    from allranks.checks.selftest import judged, run_trial
    from allranks.clusters.registry import kind_for

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
    """Shows the news of the run, and passes on the signals that this command gets."""

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


def _to_json(trial: Trial, parts: Sequence[PartResult]) -> dict[str, Any]:
    status = trial.run.record.status
    return {
        "good": trial.has_succeeded and not any(part.wrong for part in parts),
        "run": trial.run.record.id,
        "status": status.to_json(),
        "ranks": [asdict(who) for who in trial.of(RankInfo)],
        "parts": [part.to_json() for part in parts if part.kind != "ranks" or part.wrong],
    }


def _conclude(trial: Trial, parts: Sequence[PartResult]) -> int:
    run, status = trial.run, trial.run.record.status
    wrong = [part for part in parts if part.wrong]
    if wrong:
        more = f", and {format_count(len(wrong) - 1, 'other part')} of the test" if len(wrong) > 1 else ""
        what = f"{run.record.id}: {wrong[0].name}{more} went wrong"
        finds = "finds the node at fault" if len({*trial.hosts.values()}) > 1 else "looks at all that the machine has"
        fix = f"allranks check --full, with the same job, {finds}"
        raise PreflightError(what, why=wrong[0].wrong, fix=fix, see=render.path(run.attempt_folder))
    if not trial.has_succeeded:
        from allranks.checks.selftest import where

        if place := where(trial):
            render.talk(f"allranks: {run.record.id}: it ended with {place}")
        render.error(explain(run))
        return status.exit_code or 1
    took = "" if status.seconds is None else f" in {format_seconds(status.seconds)}"
    ranks = format_count(len(trial.of(RankInfo)), "rank")
    render.talk(f"allranks: {run.record.id}: self-test passed on {ranks}{took}")
    return 0


def show(trial: Trial, parts: Sequence[PartResult]) -> None:
    """Show all parts on stdout, and the ranks if they are few."""
    shown = [*_listed(parts)]
    rows = [(part.name, _result(part), *_figures(part)) for part in shown]
    if rows:
        header, *lines = render.table(("what", "result", "time", "speed"), rows).splitlines()
        text = [header]
        for part, line in zip(shown, lines, strict=True):
            text.append(line)
            if why := part.wrong or part.why_not:
                text.append(f"  {why}")
        render.data("\n".join(text))
    ranks = []
    for who in trial.of(RankInfo):
        numbers = (str(who.rank), who.host, str(who.node_rank), str(who.local_rank))
        ranks.append((*numbers, f"{who.device} {who.gpu or ''}".rstrip(), who.torch, who.backend))
    if 0 < len(ranks) <= _FEW:
        columns = ("rank", "host", "node", "local rank", "device", "torch", "backend")
        render.data("\n" + render.table(columns, ranks))


def _listed(parts: Sequence[PartResult]) -> Iterator[PartResult]:
    """Yield what has a line: of many links the slowest, and the others together."""
    for are_links, group in groupby(parts, lambda part: part.kind == "link"):
        same = [part for part in group if part.kind != "ranks" or part.wrong]
        if not are_links or len(same) <= _FEW:
            yield from same
            continue
        ordered = sorted(same, key=lambda part: float(part.figures["bandwidth"]))
        yield from ordered[:_FEW]
        speeds = " to ".join(_rate(ordered[place].figures["bandwidth"]) for place in (_FEW, -1))
        yield replace(same[0], kind="links", name=f"{len(same) - _FEW} others", figures={"what": speeds})


def _result(part: PartResult) -> str:
    if part.wrong:
        return render.graded("FAIL").replace("FAIL", "WRONG")
    return "skipped" if part.why_not else "right"


def _figures(part: PartResult) -> tuple[str, str]:
    """Return how long a part took, and how fast that is."""
    found, seconds, speed = part.figures, part.figures.get("seconds"), str(part.figures.get("what", ""))
    if part.kind == "bandwidth":
        speed = f"{_rate(found['algbw'])}, bus {_rate(found['busbw'])}"
    elif part.kind == "link":
        seconds, speed = found["bytes"] / found["bandwidth"], _rate(found["bandwidth"])
    elif part.kind == "training":
        seconds, first, last = 1 / found["steps_per_second"], found["losses"][0], found["losses"][-1]
        speed = f"{found['steps_per_second']:.0f} steps/s, loss {first:.3g} to {last:.3g} in {found['steps']} steps"
    if seconds is None:
        return "", speed
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s", speed


def _rate(amount: float) -> str:
    return f"{format_size(amount)}/s"
