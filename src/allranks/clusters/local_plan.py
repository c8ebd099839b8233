"""The plan for this machine: what runs, with how many ranks, and the script that starts it."""

from __future__ import annotations

import shlex
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import allranks
from allranks import contract
from allranks.contract import NodeSpec
from allranks.errors import JobError, PreflightError
from allranks.plan import environment, plain_launcher
from allranks.plan.entry import Entry, find_entry, name_of
from allranks.plan.layout import Layout, lay_out
from allranks.plan.machine import this_machine
from allranks.plan.orders import orders, random_port
from allranks.plan.plain_script import own_place, plain_script
from allranks.plan.plan import NodeCommand, Plan, PlanFile, Reason
from allranks.plan.resolve import (
    environment_of,
    missing_here,
    only_over_ssh,
    python_of,
    python_reason,
    unused_scheduler,
    workdir_of,
)
from allranks.plan.script import agent_script, naming_exits, node_setup

if TYPE_CHECKING:
    from pathlib import Path

    from allranks.clusters.base import Request
    from allranks.job.spec import Job

#: As torchrun's: whoever starts nodes by hand has to tell all of them the same one.
_PORT = 29500


def make_plan(request: Request) -> Plan:
    """Decide what will be executed on this machine.

    Raises:
        JobError: the job cannot run on one machine, or its script is not there.
        PreflightError: the machine lacks what the job needs.
    """
    if request.node_rank is not None:
        request = replace(request, job=_with_port(request.job))
    job = request.job
    _refuse_platform()
    _refuse(request)
    workdir = workdir_of(job, request.folder)
    python = python_of(job, request.environ)
    entry = find_entry(job, workdir, same_python=python[0] == sys.executable)
    layout = lay_out(job, this_machine(request.environ))
    return _build(request, workdir, python, entry, layout)


def with_attempt(plan: Plan, attempt: int) -> Plan:
    """Return a plan with another number of the attempt in the agent's orders, or in what the script is given."""

    def renumbered(file: PlanFile) -> PlanFile:
        if not file.path.endswith(".json"):
            return file
        return replace(file, text=replace(NodeSpec.from_json(file.text), attempt=attempt).to_json())

    commands = tuple(replace(node, command=(*node.command[:2], str(attempt))) for node in plan.commands)
    has_orders = any(file.path.endswith(".json") for file in plan.files)
    files = tuple(map(renumbered, plan.files))
    return replace(plan, attempt=attempt, files=files, commands=plan.commands if has_orders else commands)


def _refuse_platform() -> None:
    if sys.platform != "linux":
        raise PreflightError(
            f"jobs run on Linux, and this is {sys.platform}", why="the agent stands on pidfd, prctl and /proc"
        )


def _with_port(job: Job) -> Job:
    """Return a job that has a port where its nodes meet."""
    port = job.launch.master_port or _PORT
    return job.model_copy(update={"launch": job.launch.model_copy(update={"master_port": port})})


def _refuse(request: Request) -> None:
    job = request.job
    least, _ = job.resources.nodes
    if least > 1 and request.node_rank is None:
        raise JobError(
            f"{least} nodes were asked for, and cluster local is this one machine",
            fix="--nodes 1, or --on a cluster that has them",
        )
    if plain_launcher.is_used(job):
        plain_launcher.refuse(job, least if request.node_rank is not None else 1)
    elif job.launch.launcher_args:
        raise JobError("launch.launcher_args: on cluster local the agent takes none", fix="leave them out")


def _build(request: Request, workdir: Path, python: tuple[str, ...], entry: Entry, layout: Layout) -> Plan:
    job, run_dir = request.job, request.run_dir
    spec = _orders(request, python, entry, layout)
    mode = spec.file_mode
    script = _script(request, workdir, python, layout, spec)
    stem = f"node-{spec.node:03}"
    return Plan(
        run_id=run_dir.name,
        name=name_of(job),
        cluster=job.cluster if request.node_rank is None else "local",
        kind="local",
        run_dir=str(run_dir),
        workdir=str(workdir),
        nnodes=spec.nnodes,
        nproc_per_node=layout.nproc_per_node,
        backend=layout.backend,
        stop_timeout=job.launch.stop_timeout,
        files=(PlanFile(f"{stem}.sh", script, mode | 0o100), *_agents_orders(job, f"{stem}.json", spec)),
        commands=(NodeCommand(spec.node, socket.gethostname(), ("bash", str(run_dir / f"{stem}.sh"))),),
        secrets=environment.secrets(job),
        reasons=_reasons(request, spec, entry, layout),
        notes=_notes(request),
        group_readable=job.runs.group_readable,
        master_addr=spec.master_addr if spec.nnodes > 1 else "",
        master_port=spec.master_port or 0 if spec.nnodes > 1 else 0,
        stdin=_stdin(request, layout),
    )


def _stdin(request: Request, layout: Layout) -> int | None:
    """Return the rank that reads the stdin of the command: the one that is asked for, or the only one."""
    job, ranks = request.job, layout.nproc_per_node
    if plain_launcher.is_used(job) or request.node_rank is not None:
        return None
    asked = job.launch.stdin
    if asked is not None and asked >= ranks:
        raise JobError(
            f"launch.stdin: there is no rank {asked}", why=f"the ranks are 0 to {ranks - 1}", fix="--stdin 0"
        )
    return 0 if ranks == 1 else asked


def _agents_orders(job: Job, name: str, spec: NodeSpec) -> tuple[PlanFile, ...]:
    return () if plain_launcher.is_used(job) else (PlanFile(name, spec.to_json(), spec.file_mode),)


def _orders(request: Request, python: tuple[str, ...], entry: Entry, layout: Layout) -> NodeSpec:
    job, node = request.job, request.node_rank
    if node is None:
        return orders(job, request.run_dir, entry, layout, python, nodes=(1, 1))
    _, nodes = job.resources.nodes
    return orders(job, request.run_dir, entry, layout, python, nodes=(nodes, nodes), node=node)


def _settings(request: Request, layout: Layout) -> tuple[Reason, ...]:
    """Return the variables of the ranks; of several nodes each decides itself on what depends on it."""
    return environment.settings(request.job, layout if _is_alone(request) else None, request.environ)


def _is_alone(request: Request) -> bool:
    return request.node_rank is None or request.job.resources.nodes[1] == 1


def _script(request: Request, workdir: Path, python: tuple[str, ...], layout: Layout, spec: NodeSpec) -> str:
    job, run_dir = request.job, request.run_dir
    code, stem = str(run_dir / contract.CODE), f"node-{spec.node:03}"
    settings = _settings(request, layout)
    decided = [setting.subject for setting in settings if setting.subject not in job.environment.variables]
    by_hand = f"to start it by hand: bash {stem}.sh"
    is_plain, chosen = plain_launcher.is_used(job), environment_of(job, request.folder)
    head = node_setup(
        title=f"allranks {allranks.__version__}: node {spec.node} of run {run_dir.name}; {by_hand}",
        workdir=str(workdir),
        environment=naming_exits(chosen),
        settings=(
            *settings,
            Reason(contract.DECIDED, " ".join(decided), "a run that a rank starts inherits none of these"),
        ),
        variables=((contract.BACKEND, layout.backend), *([(contract.RUN_ID, run_dir.name)] if is_plain else [])),
        secrets=environment.secrets(job),
        code=shlex.quote(code),
    )
    if not is_plain:
        command = [shlex.quote(word) for word in (*python, code, str(run_dir / f"{stem}.json"))]
        return agent_script(head, chosen.container, command)
    port = spec.master_port or random_port()
    return plain_script(
        head,
        job,
        chosen,
        python,
        Entry(spec.kind, spec.target),
        mode=spec.file_mode,
        place=own_place(spec, port),
        is_alone=_is_alone(request),
        finds_port=spec.master_port is None,
    )


def _reasons(request: Request, spec: NodeSpec, entry: Entry, layout: Layout) -> tuple[Reason, ...]:
    port = f"port {spec.master_port}" if spec.master_port else "a free port"
    why = "as asked" if request.job.launch.master_addr or spec.master_port else "all ranks are on this machine"
    return (
        Reason(entry.kind, entry.target, entry.why),
        python_reason(request.job, request.environ),
        *layout.reasons,
        Reason("master", f"{spec.master_addr}, {port}", why),
        *_settings(request, layout),
        *(() if _is_alone(request) else environment.decided_on_nodes(request.job, request.environ)),
        *environment.kept(request.job, layout if _is_alone(request) else None, request.environ),
    )


def _notes(request: Request) -> tuple[str, ...]:
    """Say what the job asks for and this machine does not do: nothing is left out in silence."""
    job = request.job
    resources, retry = job.resources, job.retry
    asked = {
        "resources.nodes: this machine is the one node there is": resources.nodes[1] > 1 and request.node_rank is None,
        "resources.hosts: the job runs on this machine": resources.hosts or resources.hostfile,
        "resources.spares: nodes are kept ready over SSH only": resources.spares,
        f"cluster {job.cluster} is not used: each node is started by hand": (
            job.cluster != "local" and request.node_rank is not None
        ),
        "resources.gpu_type is not looked at on this machine": resources.gpu_type,
        "resources.time is not enforced on this machine": resources.time,
        "resources.memory is not enforced on this machine": resources.memory,
        "retry: there is no queue here to go back into": retry != type(retry)(),
        "launch.launcher: no scheduler starts ranks here, the agent does": job.launch.launcher == "direct",
    }
    plain = tuple(plain_launcher.notes(job)) if plain_launcher.is_used(job) else ()
    return (
        tuple(note for note, is_asked in asked.items() if is_asked)
        + missing_here(job, request.folder, request.environ)
        + unused_scheduler(job)
        + only_over_ssh(job)
        + plain
    )
