"""``allranks node``: one node of a job whose nodes are started by hand; and the line to type on each of them."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from allranks.cli.options import JobCommand, flag_values, job_options, launch_of, load, script_args
from allranks.cli.run import carry_out, point_latest
from allranks.contract import is_secret
from allranks.errors import JobError, PreflightError, UsageError
from allranks.job.options import OPTIONS

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind
    from allranks.job.load import LoadedJob
    from allranks.job.spec import Job
    from allranks.launch.submit import Launch
    from allranks.plan.plan import Plan

#: What each node's line gives itself, or what the nodes do not need.
_GIVEN = (
    *("resources.nodes", "resources.hosts", "resources.hostfile", "resources.spares"),
    *("launch.master_addr", "launch.master_port", "launch.attach", "sync.method"),
)


@click.command("node", cls=JobCommand)
@job_options
@click.option("--node-rank", type=int, metavar="N", help="Which node this one is, counted from 0.")
@click.pass_context
def command(ctx: click.Context, /, node_rank: int | None, **values: Any) -> int:
    """Run one node of a job here; the others are started by hand in the same way.

    Typed on each node, alike but for --node-rank. The first node, of rank 0, is where all meet:

    \b
    allranks node train.py --nnodes 2 --node-rank 0 --master-addr 192.168.1.100
    allranks node train.py --nnodes 2 --node-rank 1 --master-addr 192.168.1.100

    --master-port is 29500 unless given, and must be free on the first node. Each node keeps a record
    of its own in ./runs. TARGET, the other options and the exit codes are those of allranks run.
    """
    from allranks.clusters.registry import load_kind
    from allranks.launch import submit as launching

    loaded = load(ctx, values)
    launch = launch_of(loaded)._replace(node_rank=_checked(loaded.job, node_rank))
    if loaded.job.resources.nodes[1] > 1:
        _resolve(str(loaded.job.launch.master_addr))
    kind = load_kind("local")
    run, plan = launching.prepare(launch, kind, point_latest)
    return carry_out(run, plan, kind, launch.environ_for(plan), detach=False, plain=True)


def _checked(job: Job, node_rank: int | None) -> int:
    """Return the rank of a node that is started by hand; UsageError: it is none, or the nodes could not meet."""
    if node_rank is None:
        raise UsageError(
            "--node-rank is not given",
            why="each node needs its number",
            fix="--node-rank 0 on the first node, 1 on the next",
        )
    least, most = job.resources.nodes
    if least < most:
        raise UsageError(
            f"--nnodes {least}:{most}: nodes started by hand need a fixed number",
            fix=f"--nnodes {most} on each",
        )
    if not 0 <= node_rank < most:
        raise UsageError(
            f"--node-rank {node_rank}: there is no such node",
            why=f"of {most} the ranks are 0 to {most - 1}" if most > 1 else "the job has one node, of rank 0",
            fix="--nnodes says how many there are, on each node alike",
        )
    if most > 1 and job.launch.master_addr is None:
        raise UsageError(
            "--master-addr is not given",
            why="the nodes rendezvous at the first one, and need its address",
            fix="--master-addr with an address of the first node, on each node alike",
        )
    return node_rank


def _resolve(address: str) -> None:
    """Raise PreflightError if an address of node 0 has a typo, which would otherwise show after minutes of tries."""
    try:
        socket.getaddrinfo(address, None)
    except (socket.gaierror, UnicodeError) as error:  # A part of the name is empty or too long.
        raise PreflightError(
            f"{address} cannot be resolved on this machine",
            why=getattr(error, "strerror", None) or "no host can have this name",
            fix="--master-addr with a name or an address of the first node, on each node alike",
        ) from error


def per_node_lines(
    ctx: click.Context, values: dict[str, Any], loaded: LoadedJob, kind: ClusterKind
) -> list[dict[str, Any]]:
    """Return what to type on each node of a job: its number, its host (empty if it is not known), and the line.

    ``ctx`` and ``values`` are the words and options as they were typed. JobError, UsageError: there are no such lines.
    """
    from allranks.plan import torch_launcher

    launch = launch_of(loaded)
    launch = launch._replace(job=launch.job.model_copy(update={"sync": type(launch.job.sync)()}))
    plan = _plan(launch, kind)
    is_plain = torch_launcher.is_used(launch.job)
    typed = [*_typed(values, loaded)]
    args = ["--", *script_args(ctx)] if script_args(ctx) else []
    given = [word for flag in ("binary", "module") if values.get(flag) for word in (f"--{flag}", values[flag])]
    target = [*filter(None, [values["target"]]), *given] or ["job.yaml"]
    hosts, slots = {0: plan.master_addr}, {}  # In a local plan only the first node's host is known.
    if plan.kind != "local":
        hosts = {command.node: command.host for command in plan.commands}
        slots = {command.node: command.slots for command in plan.commands}  # Ranks, where a file of hosts has them.
    found = []
    for node in range(plan.nnodes):
        if is_plain:
            ranks, port = str(plan.world_size // plan.nnodes), str(plan.master_port)
            place = torch_launcher.NodePlace(str(plan.nnodes), str(node), ranks, shlex.quote(plan.master_addr), port)
            line = torch_launcher.line_of(launch.job, launch.folder, place)
        else:
            flags = ["--nnodes", str(plan.nnodes), "--node-rank", str(node)]
            flags += ["--master-addr", plan.master_addr, "--master-port", str(plan.master_port)]
            if slots.get(node):
                flags += ["--nproc-per-node", str(slots[node])]
            line = shlex.join(["allranks", "node", *target, *flags, *typed, *args])
        found.append({"node": node, "host": hosts.get(node, ""), "line": line})
    return found


def _plan(launch: Launch, kind: ClusterKind) -> Plan:
    from allranks.launch.submit import dry_run

    if kind.name == "local":
        plan = dry_run(launch._replace(node_rank=_checked(launch.job, 0)), kind)
        if plan.nnodes == 1:
            raise JobError("--per-node: the job has one node", fix="allranks run, or --nnodes 2 --master-addr ADDRESS")
        return plan
    plan = dry_run(launch, kind)
    if not plan.master_addr:
        raise JobError(
            f"--per-node: it is not known yet which nodes of {plan.cluster} the job will get",
            why="its scheduler chooses them when the job starts",
            fix="allranks plan -o FILE writes the script that it is given",
        )
    return plan


def _typed(values: dict[str, Any], loaded: LoadedJob) -> Iterator[str]:
    """Yield the flags as they were typed, and flags for values of this shell's variables, which the nodes lack."""
    given = flag_values(values)
    for option in OPTIONS:
        value, source = given.get(option.path), loaded.sources.get(option.path)
        if value is None and source and source.kind == "environment":
            value = os.environ.get(source.where)
        if value is None or option.path in _GIVEN:
            continue
        if option.is_flag:
            is_on = value if isinstance(value, bool) else str(value).lower() in ("1", "true", "yes", "on")
            if is_on or option.off_flag:
                yield option.flags[0] if is_on else str(option.off_flag)
            continue
        for one in value if isinstance(value, tuple) else [value]:
            name, _, _ = str(one).partition("=")
            hides = option.path == "environment.variables" and is_secret(name)
            yield from (option.flags[0], name if hides else str(one))
