"""The plan of a job on machines that pdsh reaches: that of machines over SSH, started by one pdsh."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import allranks
from allranks import contract
from allranks.clusters import ssh_plan
from allranks.clusters.pdsh_script import PDSH, finding
from allranks.clusters.pdsh_shell import pdsh_command
from allranks.clusters.ssh_script import START
from allranks.errors import JobError
from allranks.job.hosts import hosts_of
from allranks.plan.plan import PlanFile

if TYPE_CHECKING:
    from allranks.clusters.base import Request
    from allranks.plan.plan import Plan

_SSH = "kind: ssh in the entry of clusters.yaml"


def make_plan(request: Request) -> Plan:
    """Decide what will be executed on the machines of a job.

    Raises:
        JobError: the job asks for what cannot be had there, its script is not there, or its hosts cannot be read.
        PreflightError: ranks, GPUs and backend do not fit each other.
    """
    _refuse(request)
    plan = ssh_plan.make_plan(request)
    title = f"allranks {allranks.__version__}: run {plan.run_id}; by pdsh, on each machine: bash {PDSH} HOST SCRIPT …"
    file = PlanFile(PDSH, finding(title, plan.run_dir), plan.files[0].mode)
    until = f"until all nodes have begun, secrets are in {contract.SECRETS_FILE} of the run's folder"
    secret = f"pdsh passes no stdin: {until}"
    return replace(
        plan,
        kind="pdsh",
        files=(file, *plan.files),
        commands=tuple(replace(node, command=_command(plan)) for node in plan.commands),
        notes=(*(note.replace("over SSH", "over pdsh") for note in plan.notes), *([secret] if plan.secrets else [])),
    )


def _command(plan: Plan) -> tuple[str, ...]:
    """Return the command that starts all nodes, the attempt as its last word."""
    each = {node.host: shlex.split(node.command[-1])[2:] for node in plan.commands}
    common = next(iter(each.values()))[-1:]
    return pdsh_command(plan.run_dir, START, {host: words[:-1] for host, words in each.items()}, common)


def _refuse(request: Request) -> None:
    job = request.job
    if job.sync.method != "none":
        raise JobError("sync: over pdsh nothing is copied to the machines", fix=_SSH)
    if job.environment.setup:
        raise JobError("environment.setup: pdsh runs all on every machine", fix="environment.node_setup does so too")
    if job.launch.attach:
        raise JobError("launch.attach: pdsh says nothing of a connection that ends", fix=_SSH)
    for host in hosts_of(job, request.folder):
        if host.port or ":" in host.name:
            what = f"port {host.port}" if host.port else "address of IPv6"
            raise JobError(f"{host}: pdsh takes no {what}", fix=f"{_SSH}, or a name for the host")
