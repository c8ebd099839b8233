"""Whether the job gets its nodes: what the scheduler would do with it, and whether they can be probed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from allranks.checks.model import Finding, Grade, Seen, failed, passed, skipped, warned
from allranks.checks.registry import on_the_whole
from allranks.clusters.registry import load_kind
from allranks.errors import LaunchError

#: What starts within so many seconds starts now.
_NOW = 60.0
_REGARDLESS = "; --no-check submits it all the same"


@on_the_whole("scheduler", why="a scheduler rejects a job that requests more than it has, or keeps it pending forever")
def scheduler(seen: Seen) -> Iterator[Finding]:
    """Check what the scheduler would do with the job."""
    try:
        feasibility = load_kind(seen.plan.kind).feasibility(seen.plan, seen.environ)
    except LaunchError as error:
        if seen.is_submitted:  # A user who may not list nodes may still submit jobs.
            yield skipped(error.in_a_line)
            return
        fix = error.fix or f"run this where jobs of {seen.plan.cluster} can be submitted"
        yield failed(error.in_a_line, fix=fix)
        return
    if feasibility is None:
        yield skipped(f"{seen.plan.cluster}: there is no scheduler to ask")
        return
    for objection in feasibility.objections:
        if seen.is_submitted and objection.is_refusal:
            yield skipped(objection.what)  # The scheduler itself reports it next.
        elif objection.is_final:
            yield failed(objection.what, fix=objection.fix + (_REGARDLESS if seen.is_submitted else ""))
        else:
            yield warned(objection.what, fix=objection.fix)
    if feasibility.objections:
        return
    if feasibility.start is None:
        what = "it takes the job"
    elif feasibility.start - time.time() < _NOW:
        what = "the job could start now"
    else:
        what = f"the job is expected to start on {time.strftime('%A at %H:%M', time.localtime(feasibility.start))}"
    yield passed(f"{feasibility.where}: {what}")


@on_the_whole("nodes", why="no rank can start on a node that is unreachable or whose set-up fails", facts=("host",))
def nodes(seen: Seen) -> Iterator[Finding]:
    """Check that each node was probed."""
    if not seen.nodes:
        yield skipped(seen.why_no_nodes)
    lost = [node.number for node in seen.nodes if node.failure]
    needed = seen.plan.min_nodes or seen.plan.nnodes
    can_do_without = 0 not in lost and len(seen.nodes) - len(lost) >= needed  # All meet at the first one.
    for node in seen.nodes:
        if node.failure and node.failure.grade is Grade.FAIL and can_do_without:
            yield replace(node.failure, grade=Grade.WARN, why="the job starts without it")
        elif node.failure:
            yield node.failure
        elif "host" in node.facts:
            yield passed(f"Python {node.facts['host']['python']}", host=node.host)
        else:
            yield skipped(node.errors["host"], host=node.host)
