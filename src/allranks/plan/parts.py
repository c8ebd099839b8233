"""What the script of a scheduler's job is made from, and the blocks that every such script has."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks import contract
from allranks.contract import NodeSpec
from allranks.plan import batch
from allranks.plan.directives import Directive
from allranks.plan.orders import FIRST_PORT, PORTS
from allranks.plan.script import comment, export

if TYPE_CHECKING:
    from allranks.job.spec import Environment, Job
    from allranks.plan.plan import Reason

#: From a port that is taken to the next one: those next to it are what jobs take that are submitted at the same time.
_PORT_STEP = 997


@dataclass(frozen=True)
class Parts:
    """What the script is made from.

    Attributes:
        title: one line on what this is.
        job: the job.
        directives: what the scheduler is asked for; none inside an allocation.
        spec: the orders of all agents.
        workdir: absolute working directory of the ranks.
        environment: the job's, with absolute paths.
        python: command line of the ranks' interpreter.
        own_python: this command's interpreter.
        settings: variables of the ranks, with reasons.
        secrets: names of variables that must come with the environment.
        backend: the process-group backend.
        per_gpu: whether a node has a rank for each of its GPUs.
        standalone: whether the script makes the run's folder.
        inside: whether it is started inside an allocation instead of submitted.
    """

    title: str
    job: Job
    directives: Sequence[Directive]
    spec: NodeSpec
    workdir: str
    environment: Environment
    python: Sequence[str]
    own_python: str
    settings: Sequence[Reason]
    secrets: Sequence[str]
    backend: str
    per_gpu: bool
    standalone: bool
    inside: bool

    @property
    def is_direct(self) -> bool:
        """Whether the ranks are started without agents."""
        return self.job.launch.launcher == "direct"

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on without a node."""
        return not self.is_direct and self.spec.min_nodes < self.spec.nnodes


def rendezvous(parts: Parts, *, find_host: Sequence[str], number: str, count: str) -> list[str]:
    """Return the block that says where the nodes meet, and how many they are.

    Args:
        parts: of the script.
        find_host: lines that export the name of the first node.
        number: a word of shell arithmetic for a number that no other job has.
        count: a word of shell for the number of nodes.
    """
    asked = parts.job.launch
    host, port = f"${contract.RDZV_HOST}", f"${contract.RDZV_PORT}"
    host_why = "as asked" if asked.master_addr else "on the first one"
    port_why = "as asked" if asked.master_port else "which follows from the job's id and is free"
    lines = [comment(f"where the nodes meet: {host_why}, at a port {port_why}")]
    lines += [export(contract.RDZV_HOST, asked.master_addr)] if asked.master_addr else find_host
    if asked.master_port:
        return [*lines, f"export {contract.RDZV_PORT}={asked.master_port} {contract.NODE_COUNT}={count}"]
    further = _PORT_STEP - FIRST_PORT % PORTS
    return [
        *lines,
        f"export {contract.RDZV_PORT}=$(({FIRST_PORT} + {number} % {PORTS})) {contract.NODE_COUNT}={count}",
        f'while (: <"/dev/tcp/{host}/{port}") 2>/dev/null; do',
        f"  {contract.RDZV_PORT}=$(({FIRST_PORT} + ({contract.RDZV_PORT} + {further}) % {PORTS}))",
        "done",
    ]


def agent(parts: Parts, gpus: str | None) -> list[str]:
    """Return the last lines of what runs on each node: they become its agent.

    Args:
        parts: of the script.
        gpus: a word of shell for the number of this node's GPUs, where it has a rank for each; else None.
    """
    return [
        comment("a rank for each GPU of this node" if gpus else "the number of ranks on this node"),
        f"export {contract.NODE_NPROC}={gpus or parts.spec.nproc_per_node}",
        comment("the agent takes the place of this shell: it starts the ranks and watches them"),
        f"exec {_python(parts)} {batch.CODE} {batch.SPEC}",
    ]


def rank(parts: Parts, place: Mapping[str, str], ranks: Sequence[str]) -> list[str]:
    """Return the last lines of what runs for each rank, where there are no agents: they become the rank.

    Args:
        parts: of the script.
        place: words of shell for ``RANK``, ``LOCAL_RANK``, ``GROUP_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE``.
        ranks: lines that set the array ``ranks``: those of this node.
    """
    spec, python, run_id = parts.spec, _python(parts), shlex.quote(parts.spec.run_id)
    start = {"script": [*parts.python, spec.target], "module": [*parts.python, "-m", spec.target]}
    command = [*parts.environment.container, *start.get(spec.kind, [spec.target]), *spec.args]
    return [
        *ranks,
        comment("the first of them brings a companion, which keeps the heartbeat and the index of the logs"),
        f'if [ "{place["LOCAL_RANK"]}" -eq 0 ]; then',
        f'  {python} {batch.CODE} --companion "${{ranks[@]}}" &',
        "fi",
        comment("who this rank is"),
        f"export {' '.join(f'{name}={place[name]}' for name in ('RANK', 'LOCAL_RANK', 'GROUP_RANK'))}",
        f"export {' '.join(f'{name}={place[name]}' for name in ('WORLD_SIZE', 'LOCAL_WORLD_SIZE'))}",
        f"export GROUP_WORLD_SIZE=${contract.NODE_COUNT}",
        f"export MASTER_ADDR=${contract.RDZV_HOST} MASTER_PORT=${contract.RDZV_PORT} {contract.RUN_ID}={run_id}",
        comment("network and threads, as this node has them"),
        f"settings=$({python} {batch.CODE} --settings)",
        'eval "$settings"',
        "export PYTHONUNBUFFERED=${PYTHONUNBUFFERED-1}",
        f'exec {shlex.join(command)} >>"$folder/rank-$RANK.out" 2>>"$folder/rank-$RANK.err"',
    ]


def _python(parts: Parts) -> str:
    return shlex.join([*parts.environment.container, *parts.python])
