"""What the scheduler would do with the job, asked before it is submitted."""

from __future__ import annotations

import time
from collections.abc import Iterator

from allranks.clusters.outlook import Outlook
from allranks.clusters.registry import load_kind
from allranks.errors import LaunchError
from allranks.preflight.model import Finding, Seen, failed, passed, skipped, warned
from allranks.preflight.registry import on_the_whole

#: What starts within so many seconds starts now.
_NOW = 60.0
_REGARDLESS = "; --no-check submits it all the same"


@on_the_whole(
    "scheduler",
    why="a scheduler refuses a job that asks for what it does not have, or lets it wait for ever",
)
def scheduler(seen: Seen) -> Iterator[Finding]:
    """Look at what becomes of the job when it is submitted."""
    try:
        outlook = load_kind(seen.plan.kind).outlook(seen.plan, seen.environ)
    except LaunchError as error:
        if seen.is_submitted:  # Who may not list nodes may submit jobs all the same.
            yield skipped(error.in_a_line)
            return
        what = error.in_a_line
        yield failed(what, fix=error.fix or f"run this where jobs of {seen.plan.cluster} can be submitted")
        return
    if outlook is None:
        yield skipped(f"{seen.plan.cluster}: there is no scheduler to ask")
    else:
        yield from _judged(outlook, is_submitted=seen.is_submitted)


def _judged(outlook: Outlook, *, is_submitted: bool) -> Iterator[Finding]:
    for objection in outlook.objections:
        if is_submitted and objection.is_refusal:
            yield skipped(objection.what)  # The scheduler says it in a moment.
        elif objection.is_final:
            yield failed(objection.what, fix=objection.fix + (_REGARDLESS if is_submitted else ""))
        else:
            yield warned(objection.what, fix=objection.fix)
    if not outlook.objections:
        yield passed(f"{outlook.where}: {_start(outlook.start)}")


def _start(start: float | None) -> str:
    if start is None:
        return "it takes the job"
    if start - time.time() < _NOW:
        return "the job could start now"
    return f"the job is expected to start on {time.strftime('%A at %H:%M', time.localtime(start))}"
