"""Starts the agents of a run on all its machines at the same time, and says why one cannot be started."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.clusters.commands import Answer
from allranks.clusters.ssh_agents import agent_told_by, handle_of, on_nodes, tell
from allranks.clusters.ssh_copy import not_copied, said_by
from allranks.clusters.ssh_fetch import Fetched
from allranks.clusters.ssh_script import ENDED_AT_ONCE, NO_FOLDER, SETUP_LOG, UNWRITABLE
from allranks.clusters.ssh_shell import fix_for, run_all, ssh_command
from allranks.errors import LaunchError, StartCancelledError
from allranks.job.hosts import parse_hosts
from allranks.plan.script import exports
from allranks.runs.status import Handle

if TYPE_CHECKING:
    from allranks.clusters.ssh_reach import Reach
    from allranks.plan.plan import NodeCommand, Plan

#: The exit code of bash for a script that is not there.
_NOT_FOUND = 127
#: Those of rsync for a connection that broke: errors of socket I/O, and in its protocol's stream.
_BROKEN = (10, 12)


@dataclass(frozen=True)
class Begun:
    """The agents that have begun, and what their user has to know of the other nodes, a line each."""

    handle: Handle
    news: tuple[str, ...]


class _Step(Enum):
    """What is done on a machine, in this order."""

    COPY = auto()
    SETUP = auto()
    BEGIN = auto()


@dataclass(frozen=True)
class _Failure:
    """A node that does not begin: at which step, and what was said there."""

    node: NodeCommand
    answer: Answer
    step: _Step = _Step.BEGIN


def start_all(reach: Reach, plan: Plan, environ: Mapping[str, str], interrupted: Callable[[], int]) -> Begun:
    """Copy the job where that is needed, and begin all nodes of a plan, however long their set-ups take.

    Args:
        reach: the way to its machines.
        plan: the plan.
        environ: of ssh, with the values of the plan's secrets.
        interrupted: returns the number of a signal that has asked for the end; 0 if none has.

    Raises:
        LaunchError: the first one, or too many, cannot be started. Those of the other nodes are ended then.
        StartCancelledError: a signal came before; all are ended.
    """
    failures, answers = _begin_all(reach, plan, environ, interrupted)
    failures += [_Failure(node, answer) for node, answer in answers if answer.code]
    # Those that were not waited for any more, because others had failed, are not to blame.
    failures = [failure for failure in failures if not failure.answer.is_late] or failures
    begun = [agent_told_by(node, answer) for node, answer in answers if not answer.code]
    late = [agent_told_by(node, answer) for node, answer in answers if answer.is_late]
    is_enough = _can_do_without(plan, [failure.node.node for failure in failures])
    tell(reach, handle_of(plan, late if is_enough else begun + late), Path(plan.run_dir), "END", plan.stop_timeout)
    if not is_enough:
        _bring_logs(plan, failures)
        raise _cannot_start(plan, failures)
    errors = {failure.node: _cannot_start(plan, [failure]) for failure in failures}
    handle = handle_of(plan, begun)
    if errors:
        _tell_who_cannot_come(reach, plan, handle, errors, environ)
    news = (f"{error.what}: {error.why}; the run goes on without it" for error in errors.values())
    return Begun(handle, tuple(news))


_Pairs = list[tuple["NodeCommand", Answer]]
#: What is known of a command that nobody has waited for.
_MAYBE = Answer(1, "", "", is_late=True)


def _begin_all(
    reach: Reach, plan: Plan, environ: Mapping[str, str], interrupted: Callable[[], int]
) -> tuple[list[_Failure], _Pairs]:
    """Do what comes before, and begin; return the nodes for which the former failed, and what all others said.

    Raises:
        StartCancelledError: a signal came; whatever had begun is ended.
    """

    def is_over() -> bool:
        return bool(interrupted())

    # Nobody relays signals to a run that is left alone: then Ctrl-C is an exception, and any may have begun.
    pairs = [(plan.commands[plan.once.node], _MAYBE)] if plan.once else []
    failures: list[_Failure] = []
    try:
        failures = _before(plan, environ, is_over)
        if not is_over():
            unready = {failure.node.node for failure in failures}
            nodes = [node for node in plan.commands if node.node not in unready]
            pairs = [(node, _MAYBE) for node in nodes]
            pairs = [*zip(nodes, _begin(reach, plan, nodes, environ, is_over), strict=True)]
        number = interrupted()
    except KeyboardInterrupt:
        number = signal.SIGINT
    if number:
        raise _cancelled(reach, plan, pairs, number)
    return failures, pairs


def _before(plan: Plan, environ: Mapping[str, str], is_over: Callable[[], bool]) -> list[_Failure]:
    """Run what a plan has run before its nodes begin; return where it failed."""
    failures: list[_Failure] = []
    steps = [(_Step.COPY, stage) for stage in plan.copies] + ([(_Step.SETUP, (plan.once,))] if plan.once else [])
    for step, stage in steps:
        failed = {failure.node.node for failure in failures}
        commands = [one for one in stage if one.node not in failed]
        answers = run_all([one.command for one in commands], environ, seconds=None, is_over=is_over)
        if step is _Step.COPY:
            answers = _asked_again(commands, answers, environ, is_over)
        pairs = zip(commands, answers, strict=True)
        failures += [_Failure(plan.commands[one.node], answer, step) for one, answer in pairs if answer.code]
    return failures


def _asked_again(
    commands: Sequence[NodeCommand], answers: Sequence[Answer], environ: Mapping[str, str], is_over: Callable[[], bool]
) -> list[Answer]:
    """Ask where rsync's connection broke whether there is one: rsync may end before it knows that ssh has failed."""
    broken = [place for place, answer in enumerate(answers) if answer.code in _BROKEN]
    lines = [ssh_command(parse_hosts([commands[place].host])[0], ("true",)) for place in broken]
    asked = dict(zip(broken, run_all(lines, environ, is_over=is_over), strict=True))
    return [
        replace(answer, unreached=True) if place in asked and asked[place].unreached else answer
        for place, answer in enumerate(answers)
    ]


def _cancelled(reach: Reach, plan: Plan, pairs: _Pairs, number: int) -> StartCancelledError:
    """End whatever has begun, and return the error that says so."""
    begun = [agent_told_by(node, answer) for node, answer in pairs if answer.is_late or not answer.code]
    names = ", ".join(tell(reach, handle_of(plan, begun), Path(plan.run_dir), "END", plan.stop_timeout))
    why = f"{names} cannot be reached; what has begun there ends by itself when it meets nobody" if names else None
    return StartCancelledError(f"{plan.run_id} was cancelled before all its nodes had begun", number, why=why)


def _begin(
    reach: Reach, plan: Plan, nodes: Sequence[NodeCommand], environ: Mapping[str, str], is_over: Callable[[], bool]
) -> list[Answer]:
    """Begin nodes; when too many have failed, the others are not waited for."""
    missing = {node.node for node in plan.commands}.difference(node.node for node in nodes)

    def hear(place: int, answer: Answer) -> None:
        if answer.code:
            missing.add(nodes[place].node)

    def is_over_or_hopeless() -> bool:
        return is_over() or not _can_do_without(plan, missing)

    secrets = exports(plan.secrets, environ)
    told = {"run_dir": plan.run_dir, "secrets": secrets}
    return reach.begin(nodes, environ, **told, is_over=is_over_or_hopeless, hear=hear)


def _bring_logs(plan: Plan, failures: Sequence[_Failure]) -> None:
    """Bring the logs that an error names, where the machines see no folder of ours."""
    if plan.copied_to:
        nodes = [agent_told_by(failure.node, failure.answer) for failure in failures]
        Fetched(Path(plan.run_dir), nodes, plan.copied_to, Path(plan.workdir)).finish()


def _can_do_without(plan: Plan, missing: Collection[int]) -> bool:
    """Tell whether a run can go on without these nodes: all meet at node 0, so there is none without it."""
    return 0 not in missing and len(plan.commands) - len(missing) >= (plan.min_nodes or plan.nnodes)


def _tell_who_cannot_come(
    reach: Reach, plan: Plan, handle: Handle, errors: Mapping[NodeCommand, LaunchError], environ: Mapping[str, str]
) -> None:
    """Tell node 0's agent whom it need not wait for; if that fails, it begins a little later."""
    told = [{"node": node.node, "host": node.host, "why": str(error.why)} for node, error in errors.items()]
    text = "".join(json.dumps(one) + "\n" for one in told)
    path = Path(on_nodes(handle, Path(plan.run_dir)), contract.node_dir(plan.attempt, 0), contract.NOT_STARTED)
    reach.leave(plan.commands[0].host, str(path), text, 0o640 if plan.group_readable else 0o600, environ)


def _cannot_start(plan: Plan, failures: Sequence[_Failure]) -> LaunchError:
    first, *others = failures
    node, answer = first.node, first.answer
    host, more = node.host, f" (and {', '.join(other.node.host for other in others)})" if others else ""
    log = str(Path(plan.run_dir, contract.node_dir(plan.attempt, node.node), contract.AGENT_LOG))
    if answer.unreached:
        return LaunchError(
            f"cannot reach {host}{more}",
            why=said_by(answer) if first.step is _Step.COPY else answer.last_words,
            fix=fix_for(parse_hosts([host])[0], answer.err or answer.last_words),
        )
    if first.step is _Step.SETUP:
        log = str(Path(plan.run_dir, SETUP_LOG))
        return LaunchError(f"environment.setup failed on {host}", why=answer.last_words, see=log)
    if first.step is _Step.COPY:
        return not_copied(host + more, answer)
    if answer.code in (NO_FOLDER, _NOT_FOUND):
        return LaunchError(
            f"{host}{more} does not see the run's folder",
            why=answer.last_words,
            fix="runs.folder, and where the job is, must be on a filesystem that all machines share",
        )
    if answer.code == UNWRITABLE:
        return LaunchError(
            f"{host}{more} cannot write to the run's folder",
            why=answer.last_words,
            fix="free some space, or see why the folder cannot be written there",
        )
    if answer.code == ENDED_AT_ONCE and (error := _error_in(answer.out)):
        return LaunchError(f"on {host}{more}: {error['what']}", why=error["why"], fix=error["fix"], see=log)
    if answer.code == ENDED_AT_ONCE:
        return LaunchError(f"the agent on {host}{more} ended before it began", why=answer.last_words, see=log)
    return LaunchError(f"the agent on {host}{more} cannot be started", why=answer.last_words)


def _error_in(out: str) -> Mapping[str, Any] | None:
    """Return the fields of the error that an agent ended with, from what a machine told."""
    lines = [line for line in out.splitlines() if line.startswith("{")]
    with contextlib.suppress(ValueError):
        return {"why": None, "fix": None, **json.loads(lines[-1])} if lines else None
    return None
