"""This machine: one node, whose agent is a child of the command, or, detached, a process of its own."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters import agents, process
from allranks.clusters.base import Request, Started
from allranks.clusters.child import ChildAgent
from allranks.errors import LaunchError
from allranks.runs.record import Run
from allranks.runs.status import Handle, State, Status

if TYPE_CHECKING:
    from allranks.plan.plan import Plan

#: Longer than an agent takes beyond the ranks' own time to leave.
_KILL_PATIENCE = 20.0
#: A run without an agent after this long was left by a launcher that ended before it could start one.
_STARTS_WITHIN = 60.0
#: What torchrun and we set for ranks: a command that runs inside a rank must not hand it on.
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class LocalCluster:
    """The kind ``local``."""

    name = "local"

    def __init__(self) -> None:
        self._child: ChildAgent | None = None
        self._cancelled: list[Handle] = []

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed on this machine.

        Raises:
            JobError: the job cannot run on one machine, or its script is not there.
            PreflightError: the machine lacks what the job needs.
        """
        from allranks.clusters.local_plan import make_plan  # Not for those who only read what became of a run.

        return make_plan(request)

    def start(self, plan: Plan, environ: Mapping[str, str], *, detach: bool) -> Started:
        """Start the agent of the plan's one node."""
        log = Path(plan.run_dir, contract.node_dir(0, 0), contract.AGENT_LOG)
        mode = 0o640 if plan.group_readable else 0o600
        # All that belongs to the run can be found by this, whatever becomes of its agent.
        mark = {contract.RUN_DIR: plan.run_dir}
        self._child = ChildAgent(plan.commands[0].command, {**_clean(environ), **mark}, log, mode, attached=not detach)
        return self._child

    def status(self, run: Run) -> Status:
        """Find out what has become of a run, from what its agent told and whether it is alive."""
        told = agents.told_by(run.node_folder(0))
        if told.state.is_final:
            return told
        if run.record.host != socket.gethostname():
            return _elsewhere(run, told)
        if run.record.handle.pid is None and told.started is None and not _is_any_alive(run):
            return _never_started(run)
        return told if process.is_alive(run.record.handle) else self._gone(run)

    def cancel(self, run: Run) -> None:
        """End a run and wait until nothing of it is left.

        Raises:
            LaunchError: it runs on another machine, or something of it would not end.
        """
        handle = run.record.handle
        if handle.pid is not None and not process.is_here(handle):
            raise LaunchError(f"{run.record.id} runs on {handle.host}", fix=f"ssh {handle.host}, and cancel it there")
        patience = run.record.stop_timeout + _KILL_PATIENCE
        if process.is_alive(handle):
            self._cancelled.append(handle)
            process.send(handle, signal.SIGTERM)
            if not process.await_end(handle, patience):
                process.send(handle, signal.SIGKILL)
                process.await_end(handle, _KILL_PATIENCE)
            if agents.told_by(run.node_folder(0)).started is None:
                process.kill_group(handle)  # It was being set up still.
        if agents.told_by(run.node_folder(0)).state.is_final:
            return  # The agent has seen to its ranks.
        if not process.end_marked(contract.RUN_DIR, str(run.folder), run.record.stop_timeout):
            raise LaunchError(f"processes of {run.record.id} do not end", why="not even of SIGKILL")

    def _gone(self, run: Run) -> Status:
        """Make the status of a run whose agent is no more and has told of no end."""
        # Looked at again after the process: it may have told its end between the two looks.
        told = agents.told_by(run.node_folder(0))
        if told.state.is_final:
            return told
        if _is_any_alive(run):
            reason = "the agent is gone; what it had started is being ended"
            return replace(told, state=State.RUNNING, native="agent gone", reason=reason)
        mine = self._child is not None and self._child.handle == run.record.handle
        if self._child is not None and mine and (understood := self._child.understand(told)):
            return understood
        if run.record.handle in self._cancelled:
            return replace(told, state=State.CANCELLED, native="ended", reason="cancelled", exit_code=143)
        if told.started is None:
            return Status(State.FAILED, "agent gone", "the agent ended before it had started", 1)
        reason = "the agent is gone without a word: it was killed, or the machine went down"
        return replace(told, state=State.FAILED, native="agent gone", reason=reason, exit_code=1)


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name not in _RANK_VARIABLES and not name.startswith("TORCHELASTIC_")
    }


def _is_any_alive(run: Run) -> bool:
    return process.any_marked(contract.RUN_DIR, str(run.folder))


def _never_started(run: Run) -> Status:
    if time.time() - run.record.created < _STARTS_WITHIN:
        return run.record.status
    return Status(State.FAILED, "never started", "the launcher ended before it had started the agent", 1)


def _elsewhere(run: Run, told: Status) -> Status:
    age = agents.heartbeat_age(run.node_folder(0))
    host = run.record.host
    if age is not None and age < agents.HEARTBEAT_IS_OLD:
        return told
    seen = f"its agent's last heartbeat is {age:.0f} s old" if age is not None else "its agent was never heard of"
    return replace(told, state=State.UNKNOWN, native="no heartbeat", reason=f"it was started on {host}, and {seen}")
