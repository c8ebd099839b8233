"""Ranks started by torch's own launcher, without an allranks agent: limitations, command and scripts.

The script of a node is pure bash, since the ranks' Python may be too old for an agent. It records events, heartbeats
and the growth of logs as an agent does, forwards stop requests, and leaves no rank behind.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from allranks import contract
from allranks.errors import JobError
from allranks.plan import environment, script
from allranks.plan.entry import find_entry
from allranks.plan.environment import environment_of, python_of, workdir_of

if TYPE_CHECKING:
    from allranks.job.spec import Job
    from allranks.plan.entry import Program
    from allranks.record.spec import NodeSpec

#: torchrun's fixed time between SIGTERM and SIGKILL, in seconds.
_TORCHRUN_PATIENCE = 30.0
#: PyTorch before 2.0 accepts only the second spelling, which later versions still accept.
_USE_ENV, _USE_ENV_OF_ALL = "--use-env", "--use_env"
#: Interval of the script's heartbeat.
_BEAT_MS = round(contract.scaled_wait(5.0) * 1000)
#: Ends of a user's line that cannot be joined with others to one line.
_OPEN_ENDS = ("\\", "&", ";", "|", "(", "{")


class NodePlace(NamedTuple):
    """A node's place, each part a shell word; by default a variable of the script that runs there."""

    nodes: str = f'"${contract.NODE_COUNT}"'
    node: str = f'"${contract.NODE_RANK}"'
    ranks: str = f'"${contract.NODE_NPROC}"'
    master_addr: str = f'"${contract.RDZV_HOST}"'
    master_port: str = f'"${contract.RDZV_PORT}"'


def is_used(job: Job) -> bool:
    """Return whether torch's own launcher starts the ranks of a job, instead of an allranks agent."""
    return job.launch.launcher == "legacy" or not job.launch.agent


def name_of(job: Job) -> str:
    """Return the launcher's module, as ``python -m`` takes it."""
    # An environment may lack the script torchrun; PyTorch has had the module since 1.9.
    return "torch.distributed.launch" if job.launch.launcher == "legacy" else "torch.distributed.run"


def refuse(job: Job, nodes: int, ranks: Sequence[int] = ()) -> None:
    """Raise a JobError for options that these launchers do not support; ``ranks`` are the ranks of each node."""
    launch, (least, most) = job.launch, job.resources.nodes
    how = "launcher legacy" if launch.launcher == "legacy" else "launch.agent: false"
    if launch.is_direct:
        raise JobError("launcher direct starts no ranks here", why="there is no scheduler", fix="--launcher torchrun")
    if least < most or job.resources.spares:
        requested = f"{least}:{most} nodes were" if least < most else "spares were"
        raise JobError(
            f"{how}: {requested} requested, and torch's own launcher needs a fixed number of nodes",
            fix="a number of nodes and no spares, or launcher torchrun with its agent",
        )
    if launch.max_restarts and launch.launcher == "legacy":
        why = "before PyTorch 1.9 torch.distributed.launch starts ranks once"
        fix = "--max-restarts 0; where PyTorch is newer, launch.launcher_args: [--max_restarts=3] on one node"
        raise JobError(f"{how}: max_restarts cannot be {launch.max_restarts}", why=why, fix=fix)
    if launch.max_restarts and nodes > 1:
        why = "torchrun with fixed node ranks restarts ranks only on the node where one failed"
        fix = "leave the agent on: it starts those of all nodes again"
        raise JobError(f"{how}: no restarts on several nodes", why=why, fix=fix)
    if job.binary and launch.launcher == "legacy" and not {_USE_ENV, _USE_ENV_OF_ALL} & {*launch.launcher_args}:
        why = "without it torch.distributed.launch adds --local-rank to a Python script, and starts nothing else"
        raise JobError(f"{how}: a program needs --use-env", why=why, fix="launch.launcher_args: [--use-env]")
    if len({*ranks}) > 1:
        why = "the oldest of torch's own launchers number ranks as if each node had as many"
        fix = f"--nproc-per-node {min(ranks)}, or launcher torchrun with its agent"
        raise JobError(f"{how}: nodes have {min(ranks)} to {max(ranks)} ranks", why=why, fix=fix)


def refuse_scheduler(job: Job, scheduler: str) -> None:
    """Raise a JobError for these launchers under a scheduler; ``scheduler`` is its name for messages."""
    if job.launch.launcher == "legacy":
        why = f"torch.distributed.launch was replaced by torchrun, and cannot get its nodes from {scheduler}"
        raise JobError(f"launcher legacy does not exist on cluster {job.cluster}", why=why, fix="--launcher torchrun")
    if not job.launch.agent and not job.launch.is_direct:
        why = f"the nodes and their places are known to the agents alone, which {scheduler} starts"
        raise JobError(f"launch.agent cannot be false on cluster {job.cluster}", why=why, fix="--launcher direct")


def notes(job: Job) -> Iterator[str]:
    """Yield notes on differences from a run with an agent."""
    launch = job.launch
    yield f"{name_of(job)} starts the ranks: one log for all ranks of a node, and nothing for allranks top"
    if launch.restart_delay != type(launch)().restart_delay:
        yield f"launch.restart_delay is not used: {name_of(job)} waits for nothing"
    if launch.launcher == "torchrun" and launch.stop_timeout > _TORCHRUN_PATIENCE:
        yield f"launch.stop_timeout: torchrun kills its ranks {_TORCHRUN_PATIENCE:g} s after SIGTERM"
    if launch.hang_timeout or launch.on_hang:
        yield f"launch.hang_timeout and launch.on_hang are not used: {name_of(job)} does not watch for hangs"
    if job.environment.python[1:]:
        yield f"environment.python: its options are those of {name_of(job)}, which gives the ranks none"


def command(job: Job, python: Sequence[str], entry: Program, place: NodePlace) -> list[str]:
    """Return the launcher's command, in words of shell.

    The rendezvous is static: node 0 is where the job says, hostnames need not match, ``--node_rank`` numbers the ranks,
    and every version of PyTorch supports it. Options have underscores, because PyTorch before 2.0 needs them.
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


def own_place(spec: NodeSpec, port: int) -> list[str]:
    """Return the lines that set a node's place if no other script does; the script's argument is the attempt."""
    return [
        f"export {contract.RUN_DIR}={shlex.quote(spec.run_dir)} {contract.ATTEMPT}=${{1:-0}}",
        f"export {contract.NODE_RANK}={spec.node} {contract.NODE_COUNT}={spec.nnodes}",
        f"export {contract.NODE_NPROC}={spec.nproc_per_node}",
        f"export {contract.RDZV_HOST}={shlex.quote(spec.master_addr)} {contract.RDZV_PORT}={port}",
    ]


def start_lines(
    job: Job,
    python: Sequence[str],
    entry: Program,
    *,
    mode: int,
    is_alone: bool = False,
    finds_port: bool = False,
) -> list[str]:
    """Write the lines of a node's script that run torch's own launcher and record events.

    Args:
        mode: permission bits of the files that it writes.
        is_alone: whether this is the only node, so that the settings are complete.
        finds_port: whether to use the next free port if that of the place is in use.
    """
    patience = job.launch.stop_timeout
    words = {
        "umask": script.umask(mode),
        "decide_all": "" if is_alone else "decide_all",
        "finds_port": "1" if finds_port else "''",
        "beat_ms": str(_BEAT_MS),
        "patience": f"{patience:g}",
        "patience_ms": str(round(patience * 1000)),
        "command": " ".join(command(job, python, entry, NodePlace())),
        "launcher": name_of(job),
    }
    return script.fill(script.HERE / "torch_launcher.sh", words).splitlines()


def line_of(job: Job, folder: Path, place: NodePlace) -> str:
    """Return a line to paste into a shell on a node; it does not change the shell's directory or variables.

    Relative paths of the job are relative to ``folder``.

    Raises:
        JobError: the job's program does not exist, or its set-up cannot be written as one line.
    """
    workdir, (python, _) = workdir_of(job, folder), python_of(job, {})
    entry = find_entry(job, workdir, same_python=False)
    chosen = environment_of(job, folder)
    parts = [script.enter(str(workdir)), *_on_one_line("environment.setup", chosen.setup)]
    if chosen.modules:
        parts.append("module load " + shlex.join(chosen.modules))
    parts += [*script.conda_lines(chosen.conda), *script.venv_lines(chosen.venv)]
    parts += _on_one_line("environment.node_setup", chosen.node_setup)
    if given := environment.settings(job, None, {}):
        parts.append(" ".join(["export", *(f"{reason.subject}={shlex.quote(reason.value)}" for reason in given)]))
    parts += [
        f'export {name}="${{{name}?set it before}}"'
        for name in environment.secrets(job)
        if name in job.environment.variables
    ]
    parts.append(" ".join(command(job, python, entry, place)))
    return f"({' && '.join(parts)})"


def _on_one_line(key: str, lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        try:
            shlex.split(line)
            is_whole = True
        except ValueError:  # A quote is not closed.
            is_whole = False
        if not is_whole or "#" in line or "<<" in line or line.rstrip().endswith(_OPEN_ENDS):
            why = f"it would have to be a part of a longer line: {line.strip()}"
            raise JobError(f"{key} does not fit on one line", why=why, fix="put it into a file: '. ./setup.sh'")
        if line.strip():
            yield f"{{ {line.strip()}; }}"
