"""``allranks node``: one node of a job, for people who start each of them by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from allranks.cli.options import JobCommand, job_options, launch_of, load
from allranks.cli.run import carry_out, point_latest
from allranks.errors import UsageError

if TYPE_CHECKING:
    from allranks.job.spec import Job


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
    from allranks.clusters import launch as launching
    from allranks.clusters.registry import load_kind

    loaded = load(ctx, values)
    launch = replace(launch_of(loaded), node_rank=checked(loaded.job, node_rank))
    kind = load_kind("local")
    run, plan = launching.prepare(launch, kind, point_latest)
    return carry_out(run, plan, kind, launch.environ_for(plan), detach=False)


def checked(job: Job, node_rank: int | None) -> int:
    """Return the rank of a node that is started by hand.

    Raises:
        UsageError: it is none, or the nodes could not meet.
    """
    if node_rank is None:
        raise UsageError(
            "--node-rank is not given",
            why="each node has to be told which one it is",
            fix="--node-rank 0 on the first node, 1 on the next",
        )
    least, most = job.resources.nodes
    if least < most:
        raise UsageError(
            f"--nnodes {least}:{most}: nodes that are started by hand must be told how many there are",
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
            why="the nodes meet at the first one, and have to be told where that is",
            fix="--master-addr with an address of the first node, on each node alike",
        )
    return node_rank
