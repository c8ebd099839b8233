"""This machine: one node, whose agent is a child of the command, or, detached, a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import allranks
from allranks import contract
from allranks.clusters import agents, process
from allranks.clusters.base import Request, Started
from allranks.clusters.child import ChildAgent
from allranks.contract import NodeSpec
from allranks.errors import JobError, LaunchError
from allranks.plan import environment
from allranks.plan.entry import Entry, find_entry, name_of
from allranks.plan.layout import Layout, lay_out
from allranks.plan.machine import this_machine
from allranks.plan.plan import NodeCommand, Plan, PlanFile, Reason
from allranks.plan.script import node_script
from allranks.runs.record import Run
from allranks.runs.status import Handle, State, Status

if TYPE_CHECKING:
    from allranks.job.spec import Environment, Job

_MASTER = "127.0.0.1"
_SCRIPT, _SPEC = "node-000.sh", "node-000.json"
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

    def detect(self, environ: Mapping[str, str]) -> bool:
        """Tell that this machine is always at hand."""
        return True

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed on this machine.

        Raises:
            JobError: the job cannot run on one machine, or its script is not there.
            PreflightError: the machine lacks what the job needs.
        """
        job = request.job
        _refuse(job)
        workdir = Path(os.path.normpath(request.folder / job.workdir))
        if not workdir.is_dir():
            raise JobError(f"there is no working directory {workdir}", fix="workdir (--workdir) must be a folder")
        python = _python(job)
        entry = find_entry(job, workdir, same_python=python[0] == sys.executable)
        layout = lay_out(job, this_machine(request.environ))
        return _build(request, workdir, python, entry, layout)

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
        if run.record.handle.pid is None:
            return _never_started(run)
        if not process.is_here(run.record.handle):
            return _elsewhere(run, told)
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
        if process.any_marked(contract.RUN_DIR, str(run.folder)):
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


def _refuse(job: Job) -> None:
    least, _ = job.resources.nodes
    if least > 1:
        raise JobError(
            f"{least} nodes were asked for, and cluster local is this one machine",
            fix="--nodes 1, or --on a cluster that has them",
        )
    if job.launch.launcher == "legacy":
        raise JobError("launcher legacy does not exist on cluster local", fix="--launcher torchrun")
    if job.launch.launcher_args:
        raise JobError("launch.launcher_args: on cluster local the agent takes none", fix="leave them out")


def _python(job: Job) -> tuple[str, ...]:
    chosen = job.environment
    if chosen.python:
        return chosen.python
    return ("python",) if chosen.conda or chosen.venv else (sys.executable,)


def _build(request: Request, workdir: Path, python: tuple[str, ...], entry: Entry, layout: Layout) -> Plan:
    job, run_dir = request.job, request.run_dir
    spec = _node_spec(request, python, entry, layout)
    mode = spec.file_mode
    script = _script(request, workdir, python, layout)
    return Plan(
        run_id=run_dir.name,
        name=name_of(job),
        cluster=job.cluster,
        kind="local",
        run_dir=str(run_dir),
        workdir=str(workdir),
        nnodes=1,
        nproc_per_node=layout.nproc_per_node,
        backend=layout.backend,
        stop_timeout=job.launch.stop_timeout,
        files=(PlanFile(_SCRIPT, script, mode | 0o100), PlanFile(_SPEC, spec.to_json(), mode)),
        commands=(NodeCommand(0, socket.gethostname(), ("bash", str(run_dir / _SCRIPT))),),
        secrets=environment.secrets(job),
        reasons=_reasons(request, spec, entry, layout),
        notes=_notes(job),
        group_readable=job.runs.group_readable,
    )


def _node_spec(request: Request, python: tuple[str, ...], entry: Entry, layout: Layout) -> NodeSpec:
    launch = request.job.launch
    return NodeSpec(
        run_id=request.run_dir.name,
        run_dir=str(request.run_dir),
        attempt=0,
        node=0,
        nnodes=1,
        nproc_per_node=layout.nproc_per_node,
        kind=entry.kind,
        target=entry.target,
        args=request.job.args,
        python_options=python[1:],
        warm=launch.warm,
        max_restarts=launch.max_restarts,
        restart_delay=launch.restart_delay,
        stop_timeout=launch.stop_timeout,
        master_addr=launch.master_addr or _MASTER,
        master_port=launch.master_port,
        file_mode=0o640 if request.job.runs.group_readable else 0o600,
    )


def _script(request: Request, workdir: Path, python: tuple[str, ...], layout: Layout) -> str:
    job, run_dir = request.job, request.run_dir
    code = str(run_dir / contract.CODE_DIR)
    return node_script(
        title=f"allranks {allranks.__version__}: node 0 of run {run_dir.name}; to start it by hand: bash {_SCRIPT}",
        workdir=str(workdir),
        environment=_absolute(job, request.folder),
        settings=environment.settings(job, layout, request.environ),
        variables=((contract.BACKEND, layout.backend),),
        secrets=environment.secrets(job),
        command=(*python, code, str(run_dir / _SPEC)),
        code=code,
    )


def _absolute(job: Job, folder: Path) -> Environment:
    venv = job.environment.venv
    return (
        job.environment.model_copy(update={"venv": str(folder / Path(venv).expanduser())}) if venv else job.environment
    )


def _reasons(request: Request, spec: NodeSpec, entry: Entry, layout: Layout) -> tuple[Reason, ...]:
    port = str(spec.master_port) if spec.master_port else "a free port"
    why = "as asked" if request.job.launch.master_addr or spec.master_port else "all ranks are on this machine"
    return (
        Reason(entry.kind, entry.target, "what the ranks run"),
        *layout.reasons,
        Reason("master", f"{spec.master_addr}, {port}", why),
        *environment.settings(request.job, layout, request.environ),
        *environment.kept(request.job, layout, request.environ),
    )


def _notes(job: Job) -> tuple[str, ...]:
    """Say what the job asks for and this machine does not do: nothing is left out in silence."""
    resources, retry = job.resources, job.retry
    asked = {
        "resources.nodes: this machine is the one node there is": resources.nodes[1] > 1,
        "resources.gpu_type is not looked at on this machine": resources.gpu_type,
        "resources.time is not enforced on this machine": resources.time,
        "resources.memory is not enforced on this machine": resources.memory,
        "retry: there is no queue here to go back into": retry != type(retry)(),
        "launch.launcher: no scheduler starts ranks here, the agent does": job.launch.launcher == "direct",
    }
    used = [f"scheduler.{name}" for name in type(job.scheduler).model_fields if getattr(job.scheduler, name)]
    scheduler = (f"there is no scheduler here: {', '.join(used)} not used",) if used else ()
    return tuple(note for note, is_asked in asked.items() if is_asked) + scheduler


def _never_started(run: Run) -> Status:
    if time.time() - run.record.created < _STARTS_WITHIN:
        return run.record.status
    return Status(State.FAILED, "never started", "the launcher ended before it had started the agent", 1)


def _elsewhere(run: Run, told: Status) -> Status:
    age = agents.heartbeat_age(run.node_folder(0))
    host = run.record.handle.host
    if age is not None and age < agents.HEARTBEAT_IS_OLD:
        return told
    seen = f"its agent's last heartbeat is {age:.0f} s old" if age is not None else "its agent was never heard of"
    return replace(told, state=State.UNKNOWN, native="no heartbeat", reason=f"it was started on {host}, and {seen}")
