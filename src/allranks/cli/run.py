"""``allranks run``: starts a job, shows all its ranks, exits with its code."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from allranks import contract
from allranks.cli import render
from allranks.cli.findings import check_first
from allranks.cli.live import AFTER_LINES, Live, News, StatusLines
from allranks.cli.options import JobCommand, job_options, launch_of, load
from allranks.cli.runs import (
    metric_option,
    name_to_type,
    next_resume,
    plain_option,
    report,
    report_verdict,
    run_json_option,
)
from allranks.errors import AllranksError, LaunchError, RunFolderError, UsageError
from allranks.job.units import format_count, format_seconds
from allranks.logs.merge import follow
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind, Started
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_EXAMPLES = """\b
Examples:
  allranks run train.py                                     here: on all GPUs, or one rank on the CPU
  allranks run train.py --nproc-per-node 2 -- --epochs 3    two ranks; --epochs 3 is passed to the script
  allranks run train.py --nodes gpu1,gpu2                   on two machines over SSH
  allranks run job.yaml --on lab --nodes 2 --time 4h        on the cluster lab of clusters.yaml
"""


@click.command("run", cls=JobCommand, epilog=_EXAMPLES)
@job_options
@click.option("--check/--no-check", "is_checked", default=True, help="Run preflight checks first (the default).")
@click.option("--detach", "-d", is_flag=True, help="Leave the run going and return; its id goes to stdout.")
@plain_option
@metric_option
@run_json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    detach: bool,
    is_checked: bool,
    plain: bool,
    metrics: tuple[str, ...],
    as_json: bool,
    **values: Any,
) -> int:
    """Run a job and follow all its ranks.

    TARGET is a job file (job.yaml) or a script (train.py); default: job.yaml here. The script's own
    arguments follow --:

    \b
    allranks run train.py --nproc-per-node 2 -- --epochs 3

    Ends with the script's exit code; 2 if the job file or a flag is wrong, 3 if it cannot work here, 130
    after Ctrl-C.
    """
    from allranks.clusters.registry import kind_for
    from allranks.launch import submit as launching

    loaded = load(ctx, values)
    if detach and loaded.job.launch.attach:
        raise UsageError(
            "--detach lets the run continue, and --attach ends it with this command",
            why=f"launch.attach is set by {loaded.sources['launch.attach']}",
            fix="one of them; --no-attach against a file",
        )
    if detach and loaded.job.launch.stdin is not None:
        what = "--detach leaves the run without stdin, and --stdin gives it to a rank"
        raise UsageError(what, fix="one of them; --stdin alone")
    launch = launch_of(loaded)
    kind = kind_for(loaded, os.environ)
    run, plan = launching.prepare(launch, kind, point_latest)
    if is_checked:
        _show_wait(plan, "checking", plain)
        try:
            if not detach:
                launching.warm_up(launch, plan, kind, watched=render.is_lively(sys.stderr))
            check_first(run, plan, kind, launch)
        except BaseException:  # Ctrl-C too.
            kind.withdraw()
            raise
    environ = launch.environ_for(plan)
    return carry_out(run, plan, kind, environ, detach=detach, plain=plain, metrics=metrics, as_json=as_json)


def carry_out(
    run: Run,
    plan: Plan,
    kind: ClusterKind,
    environ: Mapping[str, str],
    *,
    detach: bool,
    plain: bool = False,
    metrics: Sequence[str] = (),
    as_json: bool = False,
) -> int:
    """Start a run that has been prepared, show all its ranks, and return the exit code.

    ``environ`` has the job's secrets too. With ``plain`` nothing is drawn below the log on a terminal, and else
    these ``metrics`` first. With ``as_json`` stdout gets the run as JSON, and nothing else.
    """
    from allranks.launch import submit as launching

    keyboard = plan.stdin if sys.stdin is not None and sys.stdin.isatty() else None
    live = Live(keeps_stdout=as_json, keyboard=keyboard, plain=plain)
    _show_wait(plan, "starting on", plain)
    relay = Relay(plan.stop_timeout)  # Before there is anything that a signal could leave behind.
    watched = not detach and render.is_lively(sys.stderr)
    run, started = launching.start(
        run, plan, kind, environ, detach=detach, watched=watched, interrupted=relay.interrupted
    )
    introduce(plan, run)
    from allranks.runs.code import record_code  # Now: no start waits for that, or for git.

    recording = record_code(run, plan.script, environ) if plan.script else None
    news = News(started, run, live)
    news.report()
    if detach and not relay.interrupted():
        if recording:
            recording.join()
        render.as_json(report(run)) if as_json else render.data(run.record.id)
        render.talk(f"next: allranks logs -f {name_to_type(run)}")
        return 0
    relay.attach(started, run)
    if live.is_lively:
        live.status = StatusLines(run, metrics)
    _follow(run, started, kind, live, news)
    if recording:
        recording.join()
    from allranks.launch.refresh import notify_end, observed

    run = observed(run, kind)
    try:
        run = run.with_status(run.record.status)
    except RunFolderError as error:
        render.error(error)  # The disk is full, say: the outcome is known anyway.
    notify_end(run, environ, plan.workdir)
    if as_json:
        render.as_json(report(run))
    return _conclude(run)


def introduce(plan: Plan, run: Run) -> None:
    """Report what was started, and the notes of its plan."""
    reasons = {reason.subject: reason for reason in plan.reasons}
    if plan.kind != "local":
        where = f"{render.ranks(plan)} on {render.nodes(plan)} of {plan.cluster}"
    else:
        where = f"{format_count(plan.nproc_per_node, 'rank')} on this machine"
        if plan.nnodes > 1:
            where += f", node {plan.commands[0].node} of {plan.nnodes} that meet at {reasons['master'].value}"
    render.talk(f"allranks: {run.record.id}: {where}, backend {plan.backend} ({reasons['backend'].why})")
    for reason in plan.debug:
        render.talk(f"allranks: debug: {reason.subject}={reason.value}")
    for note in plan.notes:
        render.talk(f"allranks: note: {note}")


def _show_wait(plan: Plan, what: str, plain: bool) -> None:
    """Show on a terminal that other machines are waited for, until the next message."""
    if plan.kind != "local":
        Live(plain=plain).show(f"{what} {render.nodes(plan)} of {plan.cluster}")


def point_latest(run: Run) -> None:
    """Make a run the newest here before it starts, so that status and cancel find it, also if it cannot start."""
    from allranks.runs import record

    try:
        record.point_latest(run.folder)
    except RunFolderError as error:
        render.talk(f"allranks: note: {error.what}: {error.why}")  # The run continues, and has its own name.


class Relay:
    """Passes the signals that this command gets on to the run, whose end ends this command."""

    def __init__(self, patience: float) -> None:
        self._started: Started | None = None
        self._early: list[int] = []
        self._patience = patience
        self._count = 0
        self._run: Run | None = None
        self._cancelled = False
        self._since = 0.0
        for number in _SIGNALS:
            # nohup has had SIGHUP ignored: the run shall outlive the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self)

    def interrupted(self) -> int:
        """Return the number of the first signal before the run was started that stops it; 0 if there is none."""
        return next((number for number in self._early if number != signal.SIGHUP), 0)

    def attach(self, started: Started, run: Run) -> None:
        """Take the run that has been started, and pass on earlier signals."""
        self._started, self._run = started, run
        for number in self._early:
            self(number, None)

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on, or keep it until there is a run."""
        if self._started is None:
            self._early.append(number)
            return
        if number == signal.SIGHUP and self._started.outlives and self._run:
            render.talk(f"allranks: SIGHUP: the run continues\nnext: allranks logs -f {name_to_type(self._run)}")
            raise SystemExit(128 + number)
        if self._started.handle.job_id:
            self._cancel(self._started, signal.Signals(number))
            return
        self._started.signal(number)
        self._count += 1
        name = signal.Signals(number).name
        if self._count == 1:
            again = "press Ctrl-C again to kill them" if number == signal.SIGINT else f"a second {name} kills them"
            render.talk(f"allranks: {name}: the ranks have {self._patience:g} s to save and exit; {again}")

    def _cancel(self, started: Started, number: signal.Signals) -> None:
        """Cancel a submitted job; a second signal leaves it to its scheduler, and ends this command."""
        assert self._run
        if not self._count:
            self._count, self._since = 1, time.monotonic()
            again = "once more" if number == signal.SIGINT else "a second one"
            render.talk(
                f"allranks: {number.name}: job {started.handle.job_id} is being cancelled; "
                f"{again} to leave at once, without waiting for it"
            )
            try:
                started.signal(number)
            except AllranksError as error:
                fix = f"allranks cancel {name_to_type(self._run)}"
                raise LaunchError(f"the job continues: {error.what}", why=error.why, fix=fix) from error
            self._cancelled = True
        elif time.monotonic() - self._since > contract.ONE_REQUEST_SECONDS:
            name = name_to_type(self._run)
            what = "it is cancelled" if self._cancelled else f"the cluster has not said so yet: allranks cancel {name}"
            render.talk(f"allranks: {number.name}: not waiting; {what}\nnext: allranks status {name}")
            raise SystemExit(128 + number)


def _follow(run: Run, started: Started, kind: ClusterKind, live: Live, news: News) -> None:
    def show(attempt: int) -> None:
        merged = live.merge(run, attempt)

        def step(action: Callable[[], None]) -> None:
            news.report(AFTER_LINES)
            live.step(merged, action, started.awaited)

        follow(merged, lambda: started.wait(0) or run.attempt > attempt, started.wait, around=step)
        news.report()
        live.wipe()

    for attempt in count(run.attempt):  # A scheduler may put the run back into its queue: another attempt follows.
        show(attempt)
        if run.attempt <= attempt:
            break
    if not kind.status(run).state.is_final:
        kind.cancel(run)  # Its agent was killed: see to it that no rank stays behind.


def _conclude(run: Run) -> int:
    """Report how a run ended, and return its exit code; one that was cancelled, or saved and left, is no error."""
    status = run.record.status
    if status.state is State.SUCCEEDED:
        took = "" if status.seconds is None else f" in {format_seconds(status.seconds)}"
        render.talk(f"allranks: {run.record.id} succeeded{took}")
        if status.reason:
            render.talk(f"allranks: note: {render.one_line(status.reason)}")
        return 0
    from allranks.record.events import read_saves

    steps = [save.step for save in read_saves(run.folder) if save.leaving and save.attempt == run.attempt]
    if status.state is State.CANCELLED or (status.state is State.PREEMPTED and steps):
        why = f" ({render.one_line(status.reason)})" if status.reason else ""
        saved = f" at step {steps[-1]}, with a checkpoint" if steps else ""
        verb = "was cancelled" if status.state is State.CANCELLED else "stopped"
        render.talk(f"allranks: {run.record.id} {verb}{saved}{why}")
        render.talk(next_resume(run))
    else:
        from allranks.cli.failure import explain  # A run starts sooner without it.

        report_verdict(run, beside_error=True)
        render.error(explain(run))
    return status.exit_code or 1
