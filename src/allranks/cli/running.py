"""Verbs that show what a running job does: ``allranks stacks``, ``top`` and ``watch``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli import render
from allranks.cli.runs import (
    complete_run,
    find_unfinished,
    folder_option,
    json_option,
    run_arguments,
    runs_folder,
)
from allranks.errors import RunNotFoundError, UsageError
from allranks.job.units import format_seconds, format_size
from allranks.runs.record import Run, find, run_ids
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.runs.stacks import Stacks

#: The frames of a group that are shown, from the innermost on, besides those in the user's code.
_SHOWN = 3
#: Why ranks in a state take no signal.
_DEAF_STATES = {
    "stopped": "stopped (SIGSTOP); kill -CONT PID lets it continue",
    "traced": "in a debugger",
    "held": "waiting for a disk or file server",
}
#: So long NFS may hide a new file from nodes by default (nfs(5), acdirmax).
_TIMEOUT = 60.0


@click.command("stacks")
@run_arguments
@click.option("--all", "show_all", is_flag=True, help="Show all frames.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=_TIMEOUT, metavar="SECONDS", help="Default: 60.")
@json_option
def stacks(run: str | None, folder: str | None, show_all: bool, timeout: float, as_json: bool) -> int:
    """Show where the ranks of a running job stand: the newest here that has not ended, or RUN.

    Ranks at the same place are one group, the smallest first: in a hang it has the rank that the others wait for. The
    training is not stopped. Ranks that are interpreters of their own (--no-warm, --launcher direct) are not shown.
    """
    from allranks.launch.refresh import settled
    from allranks.runs.stacks import ask

    found = settled(find_unfinished(folder, run))
    if found.record.status.state.is_final:
        is_good = found.record.status.state is State.SUCCEEDED
        fix = "allranks ps --state running lists the runs that have some" if is_good else "allranks why"
        raise RunNotFoundError(f"{found.record.id} has ended", why="only living ranks have stacks", fix=fix)
    found_stacks = ask(found, timeout)
    if as_json:
        render.as_json(asdict(found_stacks))
    else:
        render.data("\n".join(_places(found_stacks, show_all)))
        for note in _notes(found_stacks, timeout):
            render.talk(f"allranks: note: {note}")
    return 0 if found_stacks.ranks else 1


def _places(stacks: Stacks, show_all: bool) -> Iterator[str]:
    from allranks.logs.cause import is_foreign
    from allranks.record.stacks import groups
    from allranks.runs.hangs import named

    for ranks, example in groups(stacks.ranks):
        told = [f"{named(example.collective)} is pending"] if example.collective else []
        told += [] if example.frames else ["no Python frame"]
        yield _ranks(ranks) + (f": {', '.join(told)}" if told else "")
        for at, frame in enumerate(example.frames):
            if show_all or at < _SHOWN or not is_foreign(frame.file):
                yield f"  {frame.file}:{frame.line} in {frame.function}"


def _ranks(ranks: Sequence[int]) -> str:
    from allranks.logs.lineform import ranges

    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def _notes(stacks: Stacks, timeout: float) -> Iterator[str]:
    from allranks.logs.lineform import ranges
    from allranks.record.stacks import groups

    if len(groups(stacks.ranks)) > 1 and not any(each.collective for each in stacks.ranks):
        yield "ranks that advance are at different lines too: call it again to see which of them stand still"
    if stacks.without:
        yield f"ranks {ranges(stacks.without)} run in an interpreter of their own: use py-spy dump --pid PID"
    for state in ("", *_DEAF_STATES):
        if late := [rank for rank in stacks.late if stacks.states.get(rank, "") == state]:
            yield f"{_ranks(late)} did not react: {_DEAF_STATES.get(state, 'in code that takes no signals')}"
    if not (stacks.ranks or stacks.without or stacks.silent or stacks.late):
        yield "no rank of this run is running yet, or its node does not see this directory"
    if stacks.silent:
        yield f"nodes {ranges(stacks.silent)} did not answer within {timeout:g} s, or do not see this run's directory"


_HEADER = ("NODE", "CPUS", "MEMORY", "GPU", "BUSY", "GPU MEMORY", "CLOCK", "TEMP", "SEEN")
_SECONDS = 2.0


@click.command("top")
@run_arguments
@click.option("--once", is_flag=True, help="Show it once; without a terminal it is shown once anyway.")
@json_option
def top(run: str | None, folder: str | None, once: bool, as_json: bool) -> int:
    """Show what a run uses of its nodes, CPUs and GPUs: the newest here that has not ended, or RUN. Ctrl-C ends it."""
    from allranks.clusters.registry import load_kind
    from allranks.launch.refresh import settled
    from allranks.runs.usage import node_usage

    found = find_unfinished(folder, run)
    kind = load_kind(found.record.kind)  # One object: it limits how often its cluster is queried.
    found = settled(found, kind)
    if as_json:
        render.as_json([{**usage, "time": render.iso(usage["time"])} for usage in node_usage(found.attempt_folder)])
        return 0
    if once or not render.is_lively(sys.stdout) or found.record.status.state.is_final:
        render.data(_usage(found))
    else:

        def texts() -> Iterator[str]:
            nonlocal found
            while not found.record.status.state.is_final:
                yield _usage(found)
                time.sleep(_SECONDS)
                found = settled(found, kind)

        render.frames(texts())
    status = found.record.status
    if status.state.is_final:
        when = f", {render.age(status.ended)}" if status.ended else ""
        render.talk(f"{found.record.id} has already ended: {status.state.value}{when}")
    return 0


def _usage(run: Run) -> str:
    from allranks.runs.hangs import quiet_for, span
    from allranks.runs.usage import clock, node_usage

    rows = []
    for node in node_usage(run.attempt_folder):
        seen = f"{format_seconds(max(0.0, time.time() - node['time']))} ago"
        used = (f"{node['node']} {node['host']}".rstrip(), f"{node['cpus']:.1f}", format_size(node["memory"]))
        for number, gpu in enumerate(node["gpus"]):
            memory = f"{format_size(gpu['memory'])} of {format_size(gpu['total'])}"
            heat = f"{gpu['temperature']} °C" if gpu["temperature"] else "-"
            own = (str(gpu["number"]), f"{gpu['busy']} %", memory, clock(gpu) or "-", heat)
            rows.append((*(("", "", "") if number else used), *own, seen))
            seen = ""
        if not node["gpus"]:
            rows.append((*used, *("-",) * 5, seen))
    if not rows and run.record.status.state.is_final:
        return f"{run.record.id}: it ended before its first sample"
    if not rows:
        return f"{run.record.id} {run.record.status.state.value}: nothing has been seen of its nodes yet"
    is_running = run.record.status.state is State.RUNNING
    quiet = quiet_for(run.attempt_folder) if is_running else None
    return render.table(_HEADER, rows) + (f"\nno step for {span(quiet)}" if quiet else "")


@click.command("watch")
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_run)
@click.option("--all", "show_all", is_flag=True, help="List all runs here, the newest first.")
@folder_option
def watch(runs: tuple[str, ...], folder: str | None, show_all: bool) -> int:
    """Watch a run live on the full screen: the newest here that has not ended, or RUN; several as a list.

    It shows progress, metrics, nodes, events and the log. The keys stand at the bottom. After q the run continues.
    """
    if runs and show_all:
        raise UsageError("--all and RUN exclude each other", fix="allranks watch --all")
    if not (render.is_lively(sys.stdout) and sys.stdin and sys.stdin.isatty()):
        why = "stdin or stdout is not a terminal, or TERM is dumb"
        raise UsageError("watch needs a terminal", why=why, fix="allranks logs -f, or allranks status --json")
    where = runs_folder(folder)
    if len(runs) > 1:
        found = [*dict.fromkeys(find(where, name).folder for name in runs)]
        return _list(lambda: found)
    if show_all:
        return _list(lambda: [where / run_id for run_id in reversed(run_ids(where))])
    run = find_unfinished(folder, runs[0] if runs else None)
    from allranks.cli.screen import Screen

    with Screen() as screen:
        return screen.watch(run)


def _list(find_all: Callable[[], Sequence[Path]]) -> int:
    from allranks.cli.screen import Screen

    with Screen() as screen:
        return screen.watch_all(find_all)
