"""What a job file may say, typed.

Every field has a description: ``allranks schema`` and the reference page are made from this module.
"""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from allranks.job.units import (
    format_duration,
    format_memory,
    parse_duration,
    parse_memory,
    parse_nodes,
)


class Section(BaseModel):
    """A part of the job file: frozen, and every unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


def _text(value: Any) -> str:
    """Take text, or a number standing where text is meant (YAML reads ``time: 90`` as a number)."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("must be text or a number")
    return str(value)


def _duration(value: Any) -> int:
    return parse_duration(_text(value))


def _memory(value: Any) -> int:
    return parse_memory(_text(value))


def _nodes(value: Any) -> tuple[int, int]:
    if isinstance(value, tuple):
        return value
    return parse_nodes(_text(value))


def _write_nodes(nodes: tuple[int, int]) -> str:
    least, most = nodes
    return str(most) if least == most else f"{least}:{most}"


def _words(value: Any) -> Any:
    """Take a list, or one line that is split the way a shell splits it."""
    return shlex.split(value) if isinstance(value, str) else _texts(value)


def _lines(value: Any) -> Any:
    """Take a list, or a block of text with one entry a line."""
    return [line for line in value.splitlines() if line.strip()] if isinstance(value, str) else value


def _hosts(value: Any) -> Any:
    """Take a list, or one text with commas between the hosts; commas inside brackets stay."""
    if not isinstance(value, str):
        return value
    parts, depth, current = [], 0, ""
    for char in value:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [part.strip() for part in [*parts, current] if part.strip()]


def _texts(value: Any) -> Any:
    """Let numbers stand in a list of texts: ``args: [--epochs, 5]``."""
    if isinstance(value, list | tuple):
        return [_text(item) if isinstance(item, int | float) and not isinstance(item, bool) else item for item in value]
    return value


def _variables(value: Any) -> Any:
    """Let numbers stand where a variable's text is meant: ``NCCL_IB_TIMEOUT: 22``."""
    if isinstance(value, dict):
        return {
            name: str(item) if isinstance(item, int | float) and not isinstance(item, bool) else item
            for name, item in value.items()
        }
    return value


def _ranks(value: Any) -> Any:
    if isinstance(value, str) and value.isascii() and value.lstrip("-").isdigit():
        return int(value)
    if isinstance(value, str) and value not in ("auto", "gpu", "cpu"):
        raise ValueError(f"{value!r} is no number of ranks; write a number, gpu, cpu or auto")
    return value


_TEXT_SCHEMA = {"type": ["string", "integer"]}
Duration = Annotated[
    int, BeforeValidator(_duration), PlainSerializer(format_duration), WithJsonSchema(_TEXT_SCHEMA)
]
Memory = Annotated[int, BeforeValidator(_memory), PlainSerializer(format_memory), WithJsonSchema(_TEXT_SCHEMA)]
Nodes = Annotated[
    tuple[int, int], BeforeValidator(_nodes), PlainSerializer(_write_nodes), WithJsonSchema(_TEXT_SCHEMA)
]
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Lines = Annotated[tuple[str, ...], BeforeValidator(_lines)]
Hosts = Annotated[tuple[str, ...], BeforeValidator(_hosts)]
Variables = Annotated[dict[str, str], BeforeValidator(_variables)]


class Resources(Section):
    """What the job needs."""

    nodes: Nodes = (1, 1)
    """Number of nodes, or MIN:MAX for a job that runs on as many as it gets."""
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    """GPUs on each node. Default: all that a local machine has; none on a scheduler."""
    gpu_type: str | None = None
    """Type of GPU as the cluster names it, such as a100."""
    cpus_per_node: Annotated[int, Field(ge=1)] | None = None
    """CPUs on each node, shared by its ranks. Default: those that this process may use."""
    memory: Memory | None = None
    """Memory per node, such as 200GB; a bare number is megabytes."""
    time: Duration | None = None
    """Longest run time: 48:00:00, 2-12:00, 30min; a bare number is minutes."""


class Scheduler(Section):
    """What a batch scheduler is told besides the resources; a cluster without a scheduler ignores it."""

    partition: str | None = None
    """Partition (Slurm) or queue (PBS)."""
    account: str | None = None
    """Account or project that is charged."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the nodes must have."""
    include: Hosts = ()
    """Hosts that must be among the nodes."""
    exclude: Hosts = ()
    """Hosts that must not be among the nodes."""
    reservation: str | None = None
    """Reservation to run in."""
    exclusive: bool = False
    """Share the nodes with no other job."""
    array: str | None = None
    """Job array, such as 0-7 or 0-99%4."""
    mail: str | None = None
    """Address to write to when the job ends or fails."""
    output: str | None = None
    """The scheduler's own log. Default: in the run's folder."""
    error: str | None = None
    """The scheduler's own error log. Default: joined with output."""
    directives: Lines = ()
    """Further directives, passed on word for word, without the leading #SBATCH or #PBS."""


class Launch(Section):
    """How the ranks are started."""

    launcher: Literal["torchrun", "direct", "legacy"] = "torchrun"
    """torchrun: one agent per node; direct: the scheduler starts each rank; legacy: torch.distributed.launch."""
    launcher_args: Words = ()
    """Further arguments of the launcher, passed on word for word."""
    nproc_per_node: Annotated[int, Field(ge=1)] | Literal["auto", "gpu", "cpu"] = "auto"
    """Ranks on each node: a number, gpu (one per GPU), cpu (one per CPU), or auto (GPUs, else one)."""
    backend: Literal["nccl", "gloo"] | None = None
    """Process-group backend. Default: nccl where there are GPUs, else gloo."""
    max_restarts: Annotated[int, Field(ge=0)] = 0
    """How often the ranks are started anew after one has failed."""
    restart_delay: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """Seconds before the second restart in a row; each further one waits twice as long. The first waits none."""
    stop_timeout: Annotated[float, Field(ge=0, le=86400)] = 30.0
    """Seconds that ranks get to leave after SIGTERM before they are killed."""
    master_addr: str | None = None
    """Address that the ranks rendezvous at. Default: found out."""
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port that the ranks rendezvous at. Default: a free one."""
    interface: str | None = None
    """Network interface for gloo and NCCL. Default: the one that carries the route to the master."""
    warm: bool = True
    """Fork ranks from a process that has imported torch. Set to false for a script that must set
    variables such as OMP_NUM_THREADS before it imports torch."""


class Environment(Section):
    """What is set up before the ranks start."""

    variables: Variables = {}
    """Environment variables. Values of names that end in KEY, TOKEN, SECRET or PASSWORD are written nowhere."""
    modules: Words = ()
    """Environment modules to load."""
    conda: str | None = None
    """Conda environment, by name or path."""
    venv: str | None = None
    """Virtual environment, by path."""
    python: Words = ()
    """Interpreter of the ranks, with options if need be. Default: python of the conda or virtual
    environment, else the interpreter that runs allranks."""
    setup: Lines = ()
    """Shell lines that run once, before the nodes are started."""
    node_setup: Lines = ()
    """Shell lines that run on each node, before its ranks start."""
    container: Words = ()
    """Command that the node's command is put behind, such as [apptainer, exec, --nv, image.sif]."""


class Retry(Section):
    """What happens when an attempt ends before the training does."""

    requeue: bool = False
    """Put the job back into the queue at its time limit, on preemption and when a node fails."""
    resume: Literal["auto", "never"] = "auto"
    """Whether the next attempt is told to continue from the newest checkpoint."""
    max_attempts: Annotated[int, Field(ge=1)] = 10
    """Attempts after which the run is given up."""


class Runs(Section):
    """Where and how the record of the run is kept."""

    folder: str = "runs"
    """Folder that holds a folder for each run; relative to the working directory."""
    group_readable: bool = False
    """Let the group read the run's folder; otherwise only its owner can."""


class Job(Section):
    """A job: a script, its arguments, resources and environment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """Name of the job. Default: the script's."""
    script: str | None = None
    """Python script to run; relative to the working directory."""
    module: str | None = None
    """Python module to run instead of a script, as with python -m."""
    binary: str | None = None
    """Program to run instead of a script, without Python."""
    args: Words = ()
    """Arguments of the script."""
    workdir: str = "."
    """Working directory of the ranks; relative to the job file."""
    cluster: str = "local"
    """Cluster to run on: local, or a name from clusters.yaml."""
    debug: bool = False
    """Turn on what helps to see what happens: logs of NCCL and torch, consistency checks of collectives."""
    resources: Resources = Resources()
    """What the job needs."""
    launch: Launch = Launch()
    """How the ranks are started."""
    environment: Environment = Environment()
    """What is set up before the ranks start."""
    scheduler: Scheduler = Scheduler()
    """What a batch scheduler is told besides the resources."""
    retry: Retry = Retry()
    """What happens when an attempt ends before the training does."""
    runs: Runs = Runs()
    """Where and how the record of the run is kept."""


class Cluster(Section):
    """An entry of clusters.yaml: a kind of cluster, and defaults for the jobs that run there."""

    kind: str
    """Kind of the cluster: local, or what an installed extension adds."""
    resources: Resources = Resources()
    """Defaults for the section of that name in the job file."""
    launch: Launch = Launch()
    """Defaults for the section of that name in the job file."""
    environment: Environment = Environment()
    """Defaults for the section of that name in the job file."""
    scheduler: Scheduler = Scheduler()
    """Defaults for the section of that name in the job file."""
    retry: Retry = Retry()
    """Defaults for the section of that name in the job file."""
    runs: Runs = Runs()
    """Defaults for the section of that name in the job file."""
