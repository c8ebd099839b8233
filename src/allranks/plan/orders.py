"""The orders of a run's agents, from a job and what was decided for it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.contract import NodeSpec

if TYPE_CHECKING:
    from allranks.job.spec import Job
    from allranks.plan.entry import Entry
    from allranks.plan.layout import Layout

#: Ports lie below the range that outgoing connections take theirs from: 32768 and up on Linux.
FIRST_PORT, PORTS = 16384, 16000
#: Where the ranks of a single node meet; of several, the first node tells the others.
_ALONE = "127.0.0.1"


def random_port() -> int:
    """Return a port for a run where nothing else says one: the plan tells all nodes, and nobody else can guess it."""
    return FIRST_PORT + secrets.randbelow(PORTS)


def orders(
    job: Job,
    run_dir: Path,
    entry: Entry,
    layout: Layout,
    python: Sequence[str],
    *,
    nodes: tuple[int, int],
    node: int = 0,
    spares: int = 0,
) -> NodeSpec:
    """Make the orders of a node in the first attempt; those of the others differ in their place only.

    Args:
        job: the job.
        run_dir: absolute folder of the run.
        entry: what the ranks run.
        layout: how many there are on a node.
        python: the ranks' interpreter with its options.
        nodes: the fewest and the most nodes that take part.
        node: this one's place among them.
        spares: how many more wait to take the place of a lost one.
    """
    launch, (least, most) = job.launch, nodes
    return NodeSpec(
        run_id=run_dir.name,
        run_dir=str(run_dir),
        attempt=0,
        node=node,
        nnodes=most + spares,
        nproc_per_node=layout.nproc_per_node,
        kind=entry.kind,
        target=entry.target,
        args=job.args,
        python_options=tuple(python[1:]),
        warm=launch.warm,
        max_restarts=launch.max_restarts,
        restart_delay=launch.restart_delay,
        stop_timeout=launch.stop_timeout,
        master_addr=launch.master_addr or _ALONE,
        master_port=launch.master_port,
        file_mode=0o640 if job.runs.group_readable else 0o600,
        min_nodes=least,
        spares=spares,
    )
