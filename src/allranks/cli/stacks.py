"""``allranks stacks``: where the ranks of a run stand."""

from __future__ import annotations

from collections.abc import Iterator

import click

from allranks.cli import render
from allranks.cli.runs import find_unfinished, json_option, run_arguments
from allranks.errors import RunNotFoundError
from allranks.logs.cause import is_foreign
from allranks.logs.lineform import ranges
from allranks.record.stacks import groups
from allranks.runs.hangs import named, named_ranks
from allranks.runs.stacks import Stacks, ask
from allranks.runs.status import State

#: The frames of a group that are shown, from the innermost on, besides those in the user's code.
_SHOWN = 3
#: Why ranks in a state take no signal.
_STATES = {
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
def command(run: str | None, folder: str | None, show_all: bool, timeout: float, as_json: bool) -> int:
    """Show where the ranks of a running job stand: the newest here that has not ended, or RUN.

    Ranks at the same place are one group, the smallest first: in a hang it has the rank that the others wait for. The
    training is not stopped. Ranks that are interpreters of their own (--no-warm, --launcher direct) are not shown.
    """
    from allranks.launch.refresh import settled

    found = settled(find_unfinished(folder, run))
    if found.record.status.state.is_final:
        is_good = found.record.status.state is State.SUCCEEDED
        fix = "allranks ps --state running lists the runs that have some" if is_good else "allranks why"
        raise RunNotFoundError(f"{found.record.id} has ended", why="only living ranks have stacks", fix=fix)
    stacks = ask(found, timeout)
    if as_json:
        render.as_json(stacks.to_json())
    else:
        render.data("\n".join(_lines(stacks, show_all)))
        for note in _notes(stacks, timeout):
            render.talk(f"allranks: note: {note}")
    return 0 if stacks.ranks else 1


def _lines(stacks: Stacks, show_all: bool) -> Iterator[str]:
    for ranks, example in groups(stacks.ranks):
        told = [f"{named(example.collective)} is pending"] if example.collective else []
        told += [] if example.frames else ["no Python frame"]
        yield named_ranks(ranks) + (f": {', '.join(told)}" if told else "")
        for at, frame in enumerate(example.frames):
            if show_all or at < _SHOWN or not is_foreign(frame.file):
                yield f"  {frame.file}:{frame.line} in {frame.function}"


def _notes(stacks: Stacks, timeout: float) -> Iterator[str]:
    if len(groups(stacks.ranks)) > 1 and not any(each.collective for each in stacks.ranks):
        yield "ranks that advance are at different lines too: call it again to see which of them stand still"
    if stacks.without:
        yield f"ranks {ranges(stacks.without)} run in an interpreter of their own: use py-spy dump --pid PID"
    for state in ("", *_STATES):
        if late := [rank for rank in stacks.late if stacks.states.get(rank, "") == state]:
            yield f"{named_ranks(late)} did not react: {_STATES.get(state, 'in code that takes no signals')}"
    if not (stacks.ranks or stacks.without or stacks.silent or stacks.late):
        yield "no rank of this run is running yet, or its node does not see this directory"
    if stacks.silent:
        yield f"nodes {ranges(stacks.silent)} did not answer within {timeout:g} s, or do not see this run's directory"
