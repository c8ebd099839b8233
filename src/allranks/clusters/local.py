"""This machine: one node, whose agent is a child of the command, or, detached, a process of its own."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract, processes
from allranks.clusters import agents, process
from allranks.clusters.base import Look, Looked, Request, Said, Started
from allranks.clusters.child import ChildAgent
from allranks.clusters.commands import run_one
from allranks.errors import JobError, LaunchError
from allranks.job.variables import without_those_of_ranks
from allranks.runs.record import Run
from allranks.runs.status import Handle, State, Status

if TYPE_CHECKING:
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan

#: Longer than an agent takes beyond the ranks' own time to leave.
_KILL_PATIENCE = 20.0
#: A run without an agent after this long was left by a launcher that ended before it could start one.
_STARTS_WITHIN = 60.0


class LocalCluster:
    """The kind ``local``."""

    name, without = "local", ""

    def __init__(self) -> None:
        self._child: ChildAgent | None = None
        self._cancelled: set[str] = set()

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed on this machine.

        Raises:
            JobError: the job cannot run on one machine, or its script is not there.
            PreflightError: the machine lacks what the job needs.
        """
        from allranks.clusters.local_plan import make_plan  # Not for those who only read what became of a run.

        return make_plan(request)

    def shell_command(
        self, job: Job, words: Sequence[str], environ: Mapping[str, str], *, terminal: bool
    ) -> tuple[str, ...]:
        """Refuse: this machine has a shell already, and nothing to wait for.

        Raises:
            JobError: always.
        """
        raise JobError(
            f"cluster {job.cluster} has no queue that could give a shell",
            why="it is this machine: allranks run starts jobs here at once",
            fix="--on a cluster with a scheduler, or ssh HOST for a shell on another machine",
        )

    def again(self, plan: Plan, attempt: int) -> Plan:
        """Return the plan for another attempt of a run: the same but for the attempt that its agent is told."""
        from allranks.clusters.local_plan import with_attempt

        return with_attempt(plan, attempt)

    def look(self, plan: Plan, look: Look, environ: Mapping[str, str]) -> Sequence[Looked]:
        """Look at this machine."""
        (node,) = plan.commands
        command = ("bash", "-c", look.script, "bash", str(node.node))
        answer = run_one(command, without_those_of_ranks(environ), sent=look.program, seconds=look.seconds)
        return [Looked(node.host, answer)]

    def outlook(self, plan: Plan, environ: Mapping[str, str]) -> None:
        """Return None: there is no scheduler."""

    def start(self, plan: Plan, environ: Mapping[str, str], *, detach: bool, interrupted: Callable[[], int]) -> Started:
        """Start the agent of the plan's one node."""
        (node,) = plan.commands
        log = Path(plan.run_dir, contract.node_dir(plan.attempt, node.node), contract.AGENT_LOG)
        mode = 0o640 if plan.group_readable else 0o600
        # All that belongs to the run can be found by this, whatever becomes of its agent.
        mark = {contract.RUN_DIR: plan.run_dir}
        self._child = ChildAgent(
            node.command,
            {**without_those_of_ranks(environ), **mark},
            log,
            mode,
            attached=not detach,
            stdin=plan.stdin,
        )
        return self._child

    def status(self, run: Run) -> Status:
        """Find out what has become of a run, from what its agent told and whether it is alive."""
        told = agents.told_by(_folder(run))
        if told.state.is_final:
            return told
        if _host(run) != socket.gethostname():
            return _elsewhere(run, told)
        handle = _find_agent(run)
        if handle.pid is None and not self._was_cancelled(run) and not _is_any_alive(run):
            return _never_started(run)
        return told if process.is_alive(handle) else self._gone(run)

    def bring(self, run: Run) -> None:
        """Do nothing: all that a run writes is in its folder."""

    def cancel(self, run: Run) -> None:
        """End a run and wait until nothing of it is left.

        Raises:
            LaunchError: it runs on another machine, or something of it would not end.
        """
        host, handle = _host(run), _find_agent(run)
        if host != socket.gethostname():
            raise LaunchError(f"{run.record.id} runs on {host}", fix=f"ssh {host}, and cancel it there")
        patience = run.record.stop_timeout + _KILL_PATIENCE
        if process.is_alive(handle) or (handle.pid is None and _is_any_alive(run)):
            self._cancelled.add(run.record.id)
        if process.is_alive(handle):
            process.send(handle, signal.SIGTERM)
            if not process.await_end(handle, patience):
                process.send(handle, signal.SIGKILL)
                process.await_end(handle, _KILL_PATIENCE)
            if agents.told_by(_folder(run)).started is None:
                process.kill_group(handle)  # It was being set up still.
        if agents.told_by(_folder(run)).state.is_final:
            return  # The agent has seen to its ranks.
        if not process.end_marked(contract.RUN_DIR, str(run.folder), run.record.stop_timeout):
            raise LaunchError(f"processes of {run.record.id} do not end", why="not even of SIGKILL")

    def said(self, run: Run) -> Said:
        """Find what the agent said at last."""
        return agents.said(_folder(run))

    def _was_cancelled(self, run: Run) -> bool:
        return run.record.id in self._cancelled

    def _gone(self, run: Run) -> Status:
        """Make the status of a run whose agent is no more and has told of no end."""
        # Looked at again after the process: it may have told its end between the two looks.
        told = agents.told_by(_folder(run))
        if told.state.is_final:
            return told
        if _is_any_alive(run):
            reason = "the agent is gone; what it had started is being ended"
            return replace(told, state=State.RUNNING, native="agent gone", reason=reason)
        mine = self._child is not None and self._child.handle == run.record.handle
        if self._child is not None and mine and (understood := self._child.understand(told)):
            return understood
        if self._was_cancelled(run):
            return replace(told, state=State.CANCELLED, native="ended", reason="cancelled", exit_code=143)
        if told.started is None:
            # Of a detached run, whose exit code nobody has, the log has the code of a line that failed.
            reason, code = agents.failed_setup(_folder(run)) or ("the node's script ended before the agent started", 1)
            ended = self._child.code if self._child is not None and mine else None
            return Status(State.FAILED, "agent gone", reason, ended if ended and ended > 0 else code or 1)
        reason = "the agent is gone without a word: it was killed, or the machine went down"
        return replace(told, state=State.FAILED, native="agent gone", reason=reason, exit_code=1)


def _folder(run: Run) -> Path:
    """Return the folder of the one node that is here: of a job whose nodes are started by hand it may be any."""
    return next(run.attempt_folder.glob("node-*"), run.node_folder(0))


def _host(run: Run) -> str:
    return run.record.handle.host or run.record.host


def _find_agent(run: Run) -> Handle:
    """Return the handle on record or, where a launcher ended before it could write one, that of the agent we find."""
    handle = run.record.handle
    if handle.pid is None and _host(run) == socket.gethostname():
        pid = agents.agent_pid(_folder(run))
        if pid in processes.marked(contract.RUN_DIR, str(run.folder)):
            return process.identify(pid)
    return handle


def _is_any_alive(run: Run) -> bool:
    return process.any_marked(contract.RUN_DIR, str(run.folder))


def _never_started(run: Run) -> Status:
    if time.time() - run.record.created < _STARTS_WITHIN:
        return run.record.status
    return Status(State.FAILED, "never started", "the launcher ended before it had started the agent", 1)


def _elsewhere(run: Run, told: Status) -> Status:
    age = agents.heartbeat_age(_folder(run))
    host = _host(run)
    if age is not None and age < agents.HEARTBEAT_IS_OLD:
        return told
    seen = f"its agent's last heartbeat is {age:.0f} s old" if age is not None else "its agent was never heard of"
    return replace(told, state=State.UNKNOWN, native="no heartbeat", reason=f"it was started on {host}, and {seen}")
