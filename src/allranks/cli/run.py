"""``allranks run``: start a job, show all its ranks, end with its exit code."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import render
from allranks.cli.explain import explain
from allranks.cli.live import Live
from allranks.cli.options import JobCommand, job_options, launch_of, load
from allranks.cli.runs import name_to_type
from allranks.errors import RunFolderError
from allranks.job.units import format_count
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind, Started
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command("run", cls=JobCommand)
@job_options
@click.option("--detach", "-d", is_flag=True, help="Leave the run going and return; its id goes to stdout.")
@click.pass_context
def command(ctx: click.Context, /, detach: bool, **values: Any) -> int:
    """Run a job and follow all its ranks.

    TARGET is a job file (job.yaml) or a script (train.py); default: job.yaml here. The script's own
    arguments follow --:

    \b
    allranks run train.py --nproc-per-node 2 -- --epochs 3

    Ends with the script's exit code; 2 if the job file or a flag is wrong, 3 if it cannot work here, 130
    after Ctrl-C.
    """
    from allranks.clusters import launch as launching
    from allranks.clusters.registry import load_kind

    loaded = load(ctx, values)
    launch = launch_of(loaded)
    kind = load_kind(loaded.cluster.kind)
    run, plan = launching.prepare(launch, kind)
    watched = not detach and render.is_lively(sys.stderr)
    relay = None if detach else _Relay(plan.stop_timeout)  # Before there is anything that a signal could leave behind.
    run, started = launching.start(run, plan, kind, launch, detach=detach, watched=watched)
    _point_latest(run)
    _introduce(plan, run)
    if relay is None:
        return _leave_it(run)
    relay.attach(started)
    _follow(run, started, kind)
    return _conclude(_settle(run, kind))


def _introduce(plan: Plan, run: Run) -> None:
    why = {reason.subject: reason.why for reason in plan.reasons}
    ranks = format_count(plan.world_size, "rank")
    where = "this machine" if plan.nnodes == 1 else f"{plan.nnodes} nodes"
    render.talk(f"allranks: {run.record.id}: {ranks} on {where}, backend {plan.backend} ({why['backend']})")
    for reason in plan.debug:
        render.talk(f"allranks: debug: {reason.subject}={reason.value}")
    for note in plan.notes:
        render.talk(f"allranks: note: {note}")


def _point_latest(run: Run) -> None:
    from allranks.runs.record import point_latest

    try:
        point_latest(run.folder)
    except RunFolderError as error:
        render.talk(f"allranks: note: {error.what}: {error.why}")  # The run goes on, and has its own name.


def _leave_it(run: Run) -> int:
    render.data(run.record.id)
    render.talk(f"next: allranks logs -f {name_to_type(run)}")
    return 0


class _Relay:
    """Passes the signals that this command gets on to the run, which ends and so ends this command."""

    def __init__(self, patience: float) -> None:
        self._started: Started | None = None
        self._early: list[int] = []
        self._patience = patience
        self._count = 0
        for number in _SIGNALS:
            # nohup has had SIGHUP ignored: the run shall outlive the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self)

    def attach(self, started: Started) -> None:
        """Name the run, once it has been started, and pass on what came before."""
        self._started = started
        for number in self._early:
            self(number, None)

    def __call__(self, number: int, _: FrameType | None) -> None:
        if self._started is None:
            self._early.append(number)
            return
        self._started.signal(number)
        self._count += 1
        name = signal.Signals(number).name
        if self._count == 1:
            again = "once more to kill them" if number == signal.SIGINT else "a second one kills them"
            render.talk(f"allranks: {name}: the ranks have {self._patience:g} s to leave; {again}")


def _follow(run: Run, started: Started, kind: ClusterKind) -> None:
    from allranks.runs.follow import follow

    live = Live()
    merged = live.merge(run)
    follow(merged, lambda: started.wait(0), started.wait, around=lambda action: live.step(merged, action))
    live.wipe()
    if not kind.status(run).state.is_final:
        kind.cancel(run)  # Its agent was killed: see to it that no rank stays behind.


def _settle(run: Run, kind: ClusterKind) -> Run:
    from allranks.clusters.settle import observed

    run = observed(run, kind)
    try:
        return run.with_status(run.record.status)
    except RunFolderError as error:
        render.error(error)  # The disk is full, say: the outcome is known all the same.
        return run


def _conclude(run: Run) -> int:
    status = run.record.status
    if status.state is State.SUCCEEDED:
        took = f" in {render.seconds(status.ended - status.started)}" if status.ended and status.started else ""
        render.talk(f"allranks: {run.record.id} succeeded{took}")
        return 0
    render.error(explain(run))
    return status.exit_code or 1
