"""Ranks that torch's own launcher starts, without an agent of ours: its command, and what it cannot do."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks.errors import JobError

if TYPE_CHECKING:
    from allranks.job.spec import Job
    from allranks.plan.entry import Entry

#: What torchrun gives its ranks between SIGTERM and SIGKILL, whatever the job says.
_TORCHRUN_PATIENCE = 30.0
#: PyTorch before 2.0 knows only the second spelling, which later versions still take.
_USE_ENV, _USE_ENV_OF_ALL = "--use-env", "--use_env"


@dataclass(frozen=True)
class Place:
    """A node's place among all, each part a word of shell."""

    nodes: str
    node: str
    ranks: str
    master_addr: str
    master_port: str


def is_used(job: Job) -> bool:
    """Tell whether torch's own launcher starts the ranks of a job, in place of an agent of ours."""
    return job.launch.launcher == "legacy" or not job.launch.agent


def name_of(job: Job) -> str:
    """Return the launcher's module, as ``python -m`` takes it."""
    # torchrun itself is a script that an environment may lack; PyTorch has the module since 1.9.
    return "torch.distributed.launch" if job.launch.launcher == "legacy" else "torch.distributed.run"


def refuse(job: Job, nodes: int) -> None:
    """Refuse what these launchers cannot do.

    Args:
        job: the job.
        nodes: how many nodes it has.

    Raises:
        JobError: the job asks for it.
    """
    launch, (least, most), how = job.launch, job.resources.nodes, _given(job)
    if launch.launcher == "direct":
        raise JobError("launcher direct starts no ranks here", why="there is no scheduler", fix="--launcher torchrun")
    if least < most or job.resources.spares:
        asked = f"{least}:{most} nodes were" if least < most else "spares were"
        raise JobError(
            f"{how}: {asked} asked for, and torch's own launcher is told how many nodes there are",
            fix="a number of nodes and no spares, or launcher torchrun with its agent",
        )
    if launch.max_restarts and launch.launcher == "legacy":
        why = "before PyTorch 1.9 torch.distributed.launch starts ranks once"
        fix = "--max-restarts 0; where PyTorch is newer, launch.launcher_args: [--max_restarts=3] on one node"
        raise JobError(f"{how}: max_restarts cannot be {launch.max_restarts}", why=why, fix=fix)
    if launch.max_restarts and nodes > 1:
        why = "torchrun with a fixed place for each node starts ranks anew only on the node where one failed"
        fix = "leave the agent on: it starts those of all nodes anew"
        raise JobError(f"{how}: no restarts on several nodes", why=why, fix=fix)
    if job.binary and launch.launcher == "legacy" and not {_USE_ENV, _USE_ENV_OF_ALL} & {*launch.launcher_args}:
        why = "without it torch.distributed.launch adds --local-rank to a Python script, and starts nothing else"
        raise JobError(f"{how}: a program needs --use-env", why=why, fix="launch.launcher_args: [--use-env]")


def refuse_uneven(job: Job, ranks: Sequence[int]) -> None:
    """Refuse nodes that have different numbers of ranks.

    Raises:
        JobError: they have.
    """
    if len({*ranks}) > 1:
        why = "the oldest of torch's own launchers number ranks as if each node had as many"
        fix = f"--nproc-per-node {min(ranks)}, or launcher torchrun with its agent"
        raise JobError(f"{_given(job)}: nodes have {min(ranks)} to {max(ranks)} ranks", why=why, fix=fix)


def notes(job: Job) -> Iterator[str]:
    """Say what is otherwise than with an agent."""
    launch = job.launch
    yield f"{name_of(job)} starts the ranks: one log for all ranks of a node, and nothing for allranks top"
    if launch.restart_delay != type(launch)().restart_delay:
        yield f"launch.restart_delay is not used: {name_of(job)} waits for nothing"
    if launch.launcher == "torchrun" and launch.stop_timeout > _TORCHRUN_PATIENCE:
        yield f"launch.stop_timeout: torchrun kills its ranks {_TORCHRUN_PATIENCE:g} s after SIGTERM"
    if job.environment.python[1:]:
        yield f"environment.python: its options are those of {name_of(job)}, which gives the ranks none"


def command(job: Job, python: Sequence[str], entry: Entry, place: Place) -> list[str]:
    """Return the launcher's command, in words of shell.

    The rendezvous is static: node 0 is where the job says, no host's own name has to fit, ranks are numbered by
    ``--node_rank``, and every version of PyTorch understands it. Options have underscores: before 2.0 nothing else
    was understood.

    Args:
        job: the job.
        python: the ranks' interpreter, with its options.
        entry: what the ranks run.
        place: the node's.
    """
    options = [
        f"--nproc_per_node={place.ranks}",
        f"--nnodes={place.nodes}",
        f"--node_rank={place.node}",
        f"--master_addr={place.master_addr}",
        f"--master_port={place.master_port}",
    ]
    if job.launch.launcher != "legacy":
        options.append(f"--max_restarts={job.launch.max_restarts}")  # In PyTorch 1.9 the default is 3.
    args = [_USE_ENV_OF_ALL if word == _USE_ENV else word for word in job.launch.launcher_args]
    kind = {"module": ["--module"], "binary": ["--no_python"]}.get(entry.kind, [])
    words = [*job.environment.container, *python, "-m", name_of(job)]
    return [*map(shlex.quote, words), *options, *map(shlex.quote, [*args, *kind, entry.target, *job.args])]


def _given(job: Job) -> str:
    """Return the words with which a job asked for such a launcher."""
    return "launcher legacy" if job.launch.launcher == "legacy" else "launch.agent: false"
