"""What to type on each node of a job by hand: ``allranks plan --per-node``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from allranks.cli.node import checked
from allranks.cli.options import flag_values, launch_of, script_args
from allranks.errors import JobError
from allranks.job.options import OPTIONS, Option

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind
    from allranks.clusters.launch import Launch
    from allranks.job.load import LoadedJob
    from allranks.plan.plan import NodeCommand, Plan

#: What each line says itself, or what the nodes do not need to know.
_SAID = (
    *("resources.nodes", "resources.hosts", "resources.hostfile", "resources.spares"),
    *("launch.master_addr", "launch.master_port", "launch.attach", "sync.method"),
)


@dataclass(frozen=True)
class NodeLine:
    """What is typed on a node; ``host`` is empty where nobody has said which machine it is."""

    node: int
    host: str
    line: str

    def __str__(self) -> str:
        """Write it with a comment that says where."""
        return f"# node {self.node}{f' on {self.host}' if self.host else ''}\n{self.line}"


def lines(ctx: click.Context, values: dict[str, Any], loaded: LoadedJob, kind: ClusterKind) -> list[NodeLine]:
    """Return what to type on each node of a job.

    Args:
        ctx: of the verb, which has the words that were typed.
        values: of its options.
        loaded: the job.
        kind: the kind of cluster that it runs on.

    Raises:
        JobError: the nodes are not known, or the job cannot run on them.
        UsageError: nodes that are started by hand could not meet.
    """
    from allranks.plan import plain_launcher

    launch = launch_of(loaded)
    launch = replace(launch, job=launch.job.model_copy(update={"sync": type(launch.job.sync)()}))
    plan = _plan(launch, kind)
    is_plain = plain_launcher.is_used(launch.job)
    typed = [*_typed(values, loaded)]
    args = ["--", *script_args(ctx)] if script_args(ctx) else []
    found = []
    for node, host, slots in _nodes(plan):
        if is_plain:
            line = _plain(launch, plan, node)
        else:
            ranks = ["--nproc-per-node", str(slots)] if slots else []
            line = shlex.join(
                ["allranks", "node", *_target(values, loaded), *_place(plan, node), *ranks, *typed, *args]
            )
        found.append(NodeLine(node, host, line))
    return found


def _plan(launch: Launch, kind: ClusterKind) -> Plan:
    from allranks.clusters.launch import dry_run

    if kind.name == "local":
        plan = dry_run(replace(launch, node_rank=checked(launch.job, 0)), kind)
        if plan.nnodes == 1:
            raise JobError("--per-node: the job has one node", fix="allranks run, or --nnodes 2 --master-addr ADDRESS")
        return plan
    plan = dry_run(launch, kind)
    if not plan.master_addr:
        raise JobError(
            f"--per-node: nobody knows yet which nodes of {plan.cluster} the job will have",
            why="its scheduler chooses them when the job begins",
            fix="allranks plan -o FILE writes the script that it is given",
        )
    return plan


def _nodes(plan: Plan) -> Iterator[tuple[int, str, int]]:
    """Yield each node, its host if that is known, and how many ranks a file of hosts gives it."""
    if plan.kind == "local":
        yield from ((node, plan.master_addr if node == 0 else "", 0) for node in range(plan.nnodes))
        return
    by_node: dict[int, NodeCommand] = {command.node: command for command in plan.commands}
    yield from ((node, by_node[node].host, by_node[node].slots) for node in range(plan.nnodes))


def _place(plan: Plan, node: int) -> list[str]:
    meeting = ["--master-addr", plan.master_addr, "--master-port", str(plan.master_port)]
    return ["--nnodes", str(plan.nnodes), "--node-rank", str(node), *meeting]


def _plain(launch: Launch, plan: Plan, node: int) -> str:
    from allranks.plan.per_node import plain_line
    from allranks.plan.plain_launcher import Place

    place = Place(
        nodes=str(plan.nnodes),
        node=str(node),
        ranks=str(plan.world_size // plan.nnodes),
        master_addr=shlex.quote(plan.master_addr),
        master_port=str(plan.master_port),
    )
    return plain_line(launch.job, launch.folder, place)


def _target(values: dict[str, Any], loaded: LoadedJob) -> list[str]:
    for flag in ("module", "binary"):
        if values.get(flag):
            return [*([values["target"]] if values["target"] else []), f"--{flag}", values[flag]]
    return [values["target"] or "job.yaml"]


def _typed(values: dict[str, Any], loaded: LoadedJob) -> Iterator[str]:
    """Yield the flags as they were typed; what this shell's variables say, the nodes have to be told by flags too."""
    given = flag_values(values)
    for option in OPTIONS:
        if option.path in _SAID:
            continue
        value = given.get(option.path)
        source = loaded.sources.get(option.path)
        if value is None and source and source.kind == "environment":
            value = os.environ.get(source.where)
        if value is not None:
            yield from _flag(option, value)


def _flag(option: Option, value: Any) -> Iterator[str]:
    from allranks.contract import is_secret

    if option.is_flag:
        is_on = value if isinstance(value, bool) else str(value).lower() in ("1", "true", "yes", "on")
        if is_on or option.off_flag:
            yield option.flags[0] if is_on else str(option.off_flag)
        return
    for one in value if option.multiple and not isinstance(value, str) else [value]:
        name, _, _ = str(one).partition("=")
        hides = option.path == "environment.variables" and is_secret(name)
        yield from (option.flags[0], name if hides else str(one))
