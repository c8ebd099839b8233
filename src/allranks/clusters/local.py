"""This machine: one node, whose agent is a child of the command, or, detached, a process of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.base import ClusterKind, Probe, ProbeResult, Request, Started
from allranks.clusters.local_agent import ChildAgent, await_end, end_marked, identify, is_alive, send, this_host
from allranks.errors import LaunchError
from allranks.runs import agents
from allranks.runs.status import Handle, State, Status
from allranks.system import processes

if TYPE_CHECKING:  # status and ps start sooner without what starts runs and reads their logs.
    from allranks.logs.cause import LogExcerpt
    from allranks.plan.plan import Plan, PlanFile
    from allranks.runs.record import Run

#: Longer than an agent takes beyond the ranks' own time to leave.
_KILL_PATIENCE = 20.0
#: A run without an agent after this long was left by a launcher that ended before it could start one.
_STARTS_WITHIN = 60.0


#: What to do about a process that SIGKILL does not end.
_IN_KERNEL = "it waits in the kernel, for a file server or a GPU that does not answer: mend that, or reboot"


class LocalCluster(ClusterKind):
    """The kind ``local``."""

    name, without = "local", ""

    def __init__(self) -> None:
        self._child: ChildAgent | None = None
        self._cancelled: set[str] = set()

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed on this machine: with how many ranks, and the script that starts them."""
        from allranks.clusters.local_plan import LocalPlanning  # Reading a run's status needs none of it.

        return LocalPlanning(request).plan()

    def again(self, plan: Plan, attempt: int) -> Plan:
        """Return the plan for another attempt: its number is in the agent's configuration, or the script's argument."""
        from allranks.record.spec import NodeSpec

        configs = _configs(plan)
        if not configs:  # torch's own launcher starts the ranks.
            commands = tuple(replace(node, command=(*node.command[:2], str(attempt))) for node in plan.commands)
            return replace(plan, attempt=attempt, commands=commands)
        (config,) = configs
        text = NodeSpec.from_json(config.text)._replace(attempt=attempt).to_json()
        files = (replace(file, text=text) if file is config else file for file in plan.files)
        return replace(plan, attempt=attempt, files=tuple(files))

    def probe(self, plan: Plan, probe: Probe, environ: Mapping[str, str]) -> Sequence[ProbeResult]:
        """Probe this machine."""
        from allranks.job.variables import without_those_of_ranks
        from allranks.system.commands import run_one

        (node,) = plan.commands
        command = ("bash", "-c", probe.script, "bash", str(node.node))
        answer = run_one(command, without_those_of_ranks(environ), sent=probe.program, seconds=probe.seconds)
        return [ProbeResult(node.host, answer)]

    def warm_up(self, plan: Plan, environ: Mapping[str, str]) -> None:
        """Start the agent of the plan's one node: it imports torch, and waits."""
        if _configs(plan):
            self._child = _agent(plan, environ, attached=True, held=True)

    def withdraw(self) -> None:
        """Kill the agent that waits."""
        if self._child:
            self._child.kill()
            self._child = None

    def start(self, plan: Plan, environ: Mapping[str, str], *, detach: bool, interrupted: Callable[[], int]) -> Started:
        """Start the agent of the plan's one node, or let the one that waits continue."""
        if self._child:
            self._child.release()
        else:
            self._child = _agent(plan, environ, attached=not detach)
        return self._child

    def status(self, run: Run) -> Status:
        """Return the status of a run, from what its agent reported and whether it is alive."""
        reported = agents.reported_by(_folder(run))
        if reported.state.is_final:
            return reported
        if (host := _host(run)) != this_host():
            age = agents.heartbeat_age(_folder(run))
            if age is not None and age < agents.HEARTBEAT_IS_OLD:
                return reported
            seen = "its agent was never heard of" if age is None else f"its agent's last heartbeat is {age:.0f} s old"
            reason = f"it was started on {host}, and {seen}"
            return reported._replace(state=State.UNKNOWN, native="no heartbeat", reason=reason)
        handle = _find_agent(run)
        if handle.pid is None and reported.started is None and time.time() - run.record.created < _STARTS_WITHIN:
            return run.record.status  # Its agent waits while the run is checked.
        if handle.pid is None and not _is_any_alive(run):
            return Status(State.FAILED, "never started", "the launcher ended before it had started the agent", 1)
        return reported if is_alive(handle) else self._gone(run)

    def cancel(self, run: Run) -> None:
        """End a run of this machine and wait until nothing of it is left."""
        host, handle = _host(run), _find_agent(run)
        if host != this_host():
            raise LaunchError(f"{run.record.id} runs on {host}", fix=f"ssh {host}, and cancel it there")
        patience = run.record.stop_timeout + _KILL_PATIENCE
        if is_alive(handle):
            self._cancelled.add(run.record.id)
            send(handle, signal.SIGTERM)
            if not await_end(handle, patience):
                send(handle, signal.SIGKILL)
                await_end(handle, _KILL_PATIENCE)
            if handle.pid and agents.reported_by(_folder(run)).started is None:
                processes.signal_group(handle.pid, signal.SIGKILL)  # It was being set up still.
        if agents.reported_by(_folder(run)).state.is_final:
            return  # The agent has seen to its ranks.
        if not end_marked(contract.RUN_DIR, str(run.folder), run.record.stop_timeout):
            what = f"processes of {run.record.id} do not end"
            raise LaunchError(what, why="SIGKILL does not end them", fix=_IN_KERNEL)

    def log_excerpt(self, run: Run) -> LogExcerpt:
        """Find what the agent's log ends with."""
        from allranks.runs.excerpts import agent_excerpt

        return agent_excerpt(_folder(run))

    def _gone(self, run: Run) -> Status:
        """Return the status of a run whose agent is gone and has reported no end."""
        if not run.folder.is_dir():
            return Status(State.FAILED, "agent gone", "its directory was removed while it ran", 1)
        # Read again after the process: it may have reported its end between the two.
        reported = agents.reported_by(_folder(run))
        if reported.state.is_final:
            return reported
        if _is_any_alive(run):
            reason = "the agent is gone; what it had started is being ended"
            return reported._replace(state=State.RUNNING, native="agent gone", reason=reason)
        child = self._child if self._child and self._child.handle == run.record.handle else None
        if child and (understood := child.understand(reported)):
            return understood
        if run.record.id in self._cancelled:
            return reported._replace(state=State.CANCELLED, native="ended", reason="cancelled", exit_code=143)
        if reported.started is None:
            from allranks.runs.excerpts import SetupFailure, failed_setup

            # Of a detached run, whose exit code no process has, the log has the code of a line that failed.
            failure = failed_setup(_folder(run)) or SetupFailure("the node's script ended before the agent started")
            ended = child.code if child else None
            code = ended if ended and ended > 0 else failure.code or 1
            cause = next(iter(self.log_excerpt(run).causes), None)
            return Status(State.FAILED, "agent gone", failure.what, code, cause=cause)
        reason = "the agent died unexpectedly: it was killed, or the machine went down"
        return reported._replace(state=State.FAILED, native="agent gone", reason=reason, exit_code=1)


def _agent(plan: Plan, environ: Mapping[str, str], *, attached: bool, held: bool = False) -> ChildAgent:
    from allranks.job.variables import without_those_of_ranks

    (node,) = plan.commands
    log = Path(plan.run_dir, contract.node_dir(plan.attempt, node.node), contract.AGENT_LOG)
    # All that belongs to the run can be found by this variable, also when its agent is gone.
    marked = {**without_those_of_ranks(environ), contract.RUN_DIR: plan.run_dir}
    return ChildAgent(node.command, marked, log, plan.file_mode, attached=attached, stdin=plan.stdin, held=held)


def _configs(plan: Plan) -> list[PlanFile]:
    """Return the configuration of the agent, of a plan that has one."""
    return [file for file in plan.files[1:] if file.path != contract.NOTIFY_FILE]


def _folder(run: Run) -> Path:
    """Return the directory of the one node that is here: of a job whose nodes are started by hand it may be any."""
    return next(run.attempt_folder.glob("node-*"), run.node_folder(0))


def _host(run: Run) -> str:
    return run.record.handle.host or run.record.host


def _find_agent(run: Run) -> Handle:
    """Return the handle on record or, where a launcher ended before it could write one, that of the agent we find."""
    handle = run.record.handle
    if handle.pid is None and _host(run) == this_host():
        pid = agents.agent_pid(_folder(run))
        if pid in processes.marked(contract.RUN_DIR, str(run.folder)):
            return identify(pid)
    return handle


def _is_any_alive(run: Run) -> bool:
    return bool(processes.marked(contract.RUN_DIR, str(run.folder)))
