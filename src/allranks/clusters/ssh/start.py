"""Start the agents of a run on all its machines at the same time, and explain why one cannot be started."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.clusters.ssh.sync import Fetcher, error_of_rsync
from allranks.clusters.ssh.transport import Ssh, fix_for, folder_on_nodes, run_all, ssh_command
from allranks.errors import LaunchError, StartCancelledError
from allranks.logs.cause import find_cause
from allranks.runs.excerpts import failure_in
from allranks.runs.status import Handle
from allranks.system.commands import Answer

if TYPE_CHECKING:
    from allranks.plan.plan import NodeCommand, Plan

#: Exit codes of ``start.sh`` and ``setup.sh``: the agent exited at once, no directory of the run, it cannot be written.
_EXITED_AT_ONCE, _NO_FOLDER, _UNWRITABLE = 70, 72, 73
#: The exit code of a shell for a program or script that is not there.
_NOT_FOUND = 127
#: Those of rsync for a connection that broke: errors of socket I/O, and in its protocol's stream.
_BROKEN = (10, 12)
#: What to do where the agent could not say why.
_CHECK = "allranks check shows what is missing there"
#: What ``start.sh`` prints of its agent, after what else a login there may print.
_AGENT = re.compile(r"^(\d+) (\d+)$", re.MULTILINE)
#: The answer of a command that may have started, and was not waited for.
_MAYBE = Answer(1, "", "", is_late=True)


@dataclass(frozen=True)
class _Failure:
    """A node that does not start: what failed there (``copy``, ``setup`` or ``agent``), and how."""

    node: NodeCommand
    answer: Answer
    step: str = "agent"


def start_all(
    ssh: Ssh, plan: Plan, environ: Mapping[str, str], interrupted: Callable[[], int]
) -> tuple[Handle, list[str]]:
    """Copy the job where that is needed, and start all nodes of a plan, however long their set-ups take.

    Args:
        environ: of ssh, with the values of the plan's secrets.
        interrupted: returns the number of a signal that has asked for the end; 0 if none has.

    Returns:
        What identifies the agents that have started, and a line on each node that has none.

    Raises:
        LaunchError: the first one, or too many, cannot be started. Those of the other nodes are ended then.
        StartCancelledError: a signal came before; all are ended.
    """
    pairs, failures, number = _start_nodes(ssh, plan, environ, interrupted)
    started = [_agent(node, answer) for node, answer in pairs if not answer.code]
    late = [_agent(node, answer) for node, answer in pairs if answer.is_late]
    failures += [_Failure(node, answer) for node, answer in pairs if answer.code]
    # Nodes that were not waited for any more, because others had failed, are not to blame.
    failures = [failure for failure in failures if not failure.answer.is_late] or failures
    is_enough = not number and _can_do_without(plan, [failure.node.node for failure in failures])
    ended = _handle(plan, late if is_enough else started + late)
    unreached = ssh.send(ended, Path(plan.run_dir), "END", plan.stop_timeout)
    if number:
        why = f"{', '.join(unreached)} cannot be reached; agents there exit on their own when no other node answers"
        what = f"{plan.run_id} was cancelled before it had started"
        raise StartCancelledError(what, number, why=why if unreached else None)
    if not is_enough:
        reached = [_agent(failure.node, failure.answer) for failure in failures if not failure.answer.unreached]
        if reached:  # The error names a log.
            Fetcher(Path(plan.run_dir), _handle(plan, reached)).finish()
        raise _cannot_start(plan, failures)
    errors = [(failure.node, _cannot_start(plan, [failure])) for failure in failures]
    if errors:  # Node 0's agent need not wait for these; if this fails, ranks start a little later.
        lines = [{"node": node.node, "host": node.host, "why": str(error.why)} for node, error in errors]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        folder = folder_on_nodes(plan.copied_to, Path(plan.run_dir))
        path = f"{folder}/{contract.node_dir(plan.attempt, 0)}/{contract.NOT_STARTED}"
        ssh.leave(plan.commands[0].host, path, text, plan.file_mode, environ)
    return _handle(plan, started), [f"{error.in_a_line}; the run continues without it" for _, error in errors]


def _start_nodes(
    ssh: Ssh, plan: Plan, environ: Mapping[str, str], interrupted: Callable[[], int]
) -> tuple[list[tuple[NodeCommand, Answer]], list[_Failure], int]:
    """Return the nodes that may have started, with their answers; what failed before that; and a signal that came."""
    # Signals may not be handled here: then Ctrl-C is an exception, and any command may have started.
    pairs = [(plan.commands[plan.once.node], _MAYBE)] if plan.once else []
    failures: list[_Failure] = []
    try:
        failures = _prepare(plan, environ, lambda: bool(interrupted()))
        if not interrupted():
            missing = {failure.node.node for failure in failures}
            nodes = [node for node in plan.commands if _can_do_without(plan, missing) and node.node not in missing]
            pairs = [(node, _MAYBE) for node in nodes]

            def hear(place: int, answer: Answer) -> None:
                if answer.code:
                    missing.add(nodes[place].node)

            def is_over() -> bool:
                return bool(interrupted()) or not _can_do_without(plan, missing)

            pairs = [*zip(nodes, ssh.begin(plan, nodes, environ, is_over, hear), strict=True)]
        number = interrupted()
    except KeyboardInterrupt:
        number = signal.SIGINT
    return pairs, failures, number


def _prepare(plan: Plan, environ: Mapping[str, str], is_over: Callable[[], bool]) -> list[_Failure]:
    """Copy the job and run its set-up, before its nodes start; return where that failed."""
    failures: list[_Failure] = []
    stages = [("copy", stage) for stage in plan.copies]
    if plan.once:
        stages.append(("setup", (plan.once,)))
    for step, stage in stages:
        failed = {failure.node.node for failure in failures}
        commands = [one for one in stage if one.node not in failed]
        answers = run_all([one.command for one in commands], environ, seconds=None, is_over=is_over)
        # rsync may exit before it knows that ssh has failed: then ssh by itself shows it.
        broken = [at for at, answer in enumerate(answers) if step == "copy" and answer.code in _BROKEN]
        lines = [ssh_command(commands[at].host, ("true",)) for at in broken]
        for at, again in zip(broken, run_all(lines, environ, is_over=is_over), strict=True):
            answers[at] = answers[at]._replace(unreached=again.unreached)
        pairs = zip(commands, answers, strict=True)
        failures += [_Failure(plan.commands[one.node], answer, step) for one, answer in pairs if answer.code]
    return failures


def _can_do_without(plan: Plan, missing: Collection[int]) -> bool:
    """Return whether a run can do without these nodes: never without node 0, the rendezvous."""
    return 0 not in missing and len(plan.commands) - len(missing) >= (plan.min_nodes or plan.nnodes)


def _agent(node: NodeCommand, answer: Answer) -> dict[str, Any]:
    """Return what identifies the agent that a machine reported; 0 where it has reported none."""
    found = _AGENT.search(answer.out)
    pid, started = (int(found[1]), int(found[2])) if found else (0, 0)
    return {"node": node.node, "host": node.host, "pid": pid, "started": started}


def _handle(plan: Plan, nodes: Sequence[Mapping[str, Any]]) -> Handle:
    """Return what identifies a run that starts now on these nodes."""
    folders = {"copied_to": plan.copied_to, "workdir": plan.workdir}
    return Handle(host=socket.gethostname(), extra={"nodes": [*nodes], "began": time.time(), **folders})


def _cannot_start(plan: Plan, failures: Sequence[_Failure]) -> LaunchError:
    """Return the error for nodes that cannot be started, by what happened on the first of them."""
    first, *others = failures
    answer, host = first.answer, first.node.host
    hosts = f"{host} (and {', '.join(other.node.host for other in others)})" if others else host
    why, copy_why = answer.last_words, error_of_rsync(answer)
    log = str(Path(plan.run_dir, contract.node_dir(plan.attempt, first.node.node), contract.AGENT_LOG))
    setup_log = str(Path(plan.run_dir, "setup.log"))
    if answer.unreached:
        fix = fix_for(host, answer.err or why)
        return LaunchError(f"cannot reach {hosts}", why=copy_why if first.step == "copy" else why, fix=fix)
    script = "setup.sh" if first.step == "setup" else "node.sh"
    if failed := failure_in(why, Path(plan.run_dir), Path(plan.run_dir, script)):
        cause, see = find_cause(answer.err.splitlines()[:-1]), setup_log if first.step == "setup" else log
        error = LaunchError(f"on {hosts}: {failed.what}", why=cause, fix=failed.fix or None, see=see)
        error.exit_code = failed.code
        return error
    if first.step == "setup":
        fix = f"ssh {host}, and try its lines there one by one"
        return LaunchError(f"environment.setup failed on {host}", why=why, fix=fix, see=setup_log)
    if first.step == "copy" and answer.code == _NOT_FOUND:
        return LaunchError(f"{hosts}: there is no rsync", why=copy_why, fix="install rsync on all machines")
    if first.step == "copy":
        fix = "see what rsync says; sync.folder names another directory for the copy"
        return LaunchError(f"the job cannot be copied to {hosts}", why=copy_why, fix=fix)
    if answer.code in (_NO_FOLDER, _NOT_FOUND):
        fix = "runs.folder, and where the job is, must be on a filesystem that all machines share"
        return LaunchError(f"{hosts} does not see the run's directory", why=why, fix=fix)
    if answer.code == _UNWRITABLE:
        fix = "free some space, or see why the directory cannot be written there"
        return LaunchError(f"{hosts} cannot write to the run's directory", why=why, fix=fix)
    if answer.code != _EXITED_AT_ONCE:
        return LaunchError(f"the agent on {hosts} cannot be started", why=why, fix=_CHECK)
    # Where the agent could say why, its event of that is the last line in braces.
    with contextlib.suppress(ValueError, IndexError):
        error = json.loads([line for line in answer.out.splitlines() if line.startswith("{")][-1])
        return LaunchError(f"on {hosts}: {error['what']}", why=error.get("why"), fix=error.get("fix"), see=log)
    return LaunchError(f"the agent on {hosts} ended before it started", why=why, fix=_CHECK, see=log)
