"""What a job file may say, typed.

Every field has a docstring: ``allranks schema`` and the reference page are made from them. They are read
from the source only then (see ``schema.py``): pydantic reading them here would take 28 ms of every command.

A number in a job file comes as it was written (see ``yaml.py``): text fields get ``3.10`` and not 3.1.
"""

from __future__ import annotations

import re
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

    # Inputs are hidden because pydantic's own messages would show the values of secrets.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    """Take text, or a number standing where text is meant (YAML reads ``time: 90`` as a number)."""
    if isinstance(value, str):
        return value
    if not _is_number(value):
        raise ValueError("it must be text")
    return str(getattr(value, "written", value))


def _number(value: Any) -> Any:
    """Refuse true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


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


def _texts(value: Any) -> Any:
    """Let numbers stand in a list of texts: ``args: [--epochs, 5]``."""
    if isinstance(value, list | tuple):
        return [_text(item) if _is_number(item) else item for item in value]
    return [_text(value)] if _is_number(value) else value


def _words(value: Any) -> Any:
    """Take a list, or one line that is split the way a shell splits it."""
    if not isinstance(value, str):
        return _texts(value)
    try:
        return shlex.split(value)
    except ValueError:
        raise ValueError("a quotation mark is not closed; write a list, one entry for each argument") from None


def _lines(value: Any) -> Any:
    """Take a list, or a block of text with one entry a line."""
    if not isinstance(value, str):
        return _texts(value)
    return [line for line in value.splitlines() if line.strip()]


def _hosts(value: Any) -> Any:
    """Take a list, or one text with commas between the hosts; commas inside brackets stay."""
    if not isinstance(value, str):
        return _texts(value)
    parts, depth, current = [], 0, ""
    for char in value:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [part.strip() for part in [*parts, current] if part.strip()]


def _variables(value: Any) -> Any:
    """Let numbers stand where a variable's text is meant: ``NCCL_IB_TIMEOUT: 22``."""
    if isinstance(value, dict):
        return {name: _text(item) if _is_number(item) else item for name, item in value.items()}
    return value


def _ranks(value: Any) -> int | str:
    if isinstance(value, str) and value in ("auto", "gpu", "cpu"):
        return value
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("it must be a number, gpu, cpu or auto")
    if value < 1:
        raise ValueError("it must be at least 1; write gpu for a rank per GPU, or auto")
    return int(value)


_WHOLE = re.compile(r"[+-]?\d{1,9}", re.ASCII)
_TEXT = {"type": ["string", "number"]}
_DEFAULT_LIST = {"type": "array", "items": _TEXT}

Text = Annotated[str, BeforeValidator(_text), WithJsonSchema(_TEXT)]
Count = Annotated[int, Field(ge=0), BeforeValidator(_number)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_number)]
Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False), BeforeValidator(_number)]
Duration = Annotated[int, BeforeValidator(_duration), PlainSerializer(format_duration), WithJsonSchema(_TEXT)]
Memory = Annotated[int, BeforeValidator(_memory), PlainSerializer(format_memory), WithJsonSchema(_TEXT)]
Nodes = Annotated[
    tuple[int, int],
    BeforeValidator(_nodes),
    PlainSerializer(_write_nodes),
    WithJsonSchema({"type": ["string", "integer"], "pattern": r"^\s*\d+(:\d+)?\s*$", "minimum": 1}),
]
Ranks = Annotated[
    int | Literal["auto", "gpu", "cpu"],
    BeforeValidator(_ranks),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["auto", "gpu", "cpu"]}]}),
]


def _list_or_text(text: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [_DEFAULT_LIST, {**_TEXT, "description": text}]})


Words = Annotated[tuple[str, ...], BeforeValidator(_words), _list_or_text("split as a shell splits it")]
Lines = Annotated[tuple[str, ...], BeforeValidator(_lines), _list_or_text("one entry a line")]
Hosts = Annotated[tuple[str, ...], BeforeValidator(_hosts), _list_or_text("separated by commas")]
Variables = Annotated[
    dict[str, str],
    BeforeValidator(_variables),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "additionalProperties": {"type": ["string", "number", "null"]},
        }
    ),
]


class Resources(Section):
    """What the job needs."""

    nodes: Nodes = (1, 1)
    """Number of nodes, or MIN:MAX for a job that runs on as many as it gets."""
    gpus_per_node: Count | None = None
    """GPUs on each node. Default: all that a local machine has; none on a scheduler."""
    gpu_type: Text | None = None
    """Type of GPU as the cluster names it, such as a100."""
    cpus_per_node: Positive | None = None
    """CPUs on each node, shared by its ranks. Default: those that this process may use."""
    memory: Memory | None = None
    """Memory per node, such as 200GB; a bare number is megabytes."""
    time: Duration | None = None
    """Longest run time: 48:00:00, 2-12:00, 30min; a bare number is minutes."""


class Scheduler(Section):
    """What a batch scheduler is told besides the resources; a cluster without a scheduler ignores it."""

    partition: Text | None = None
    """Partition (Slurm) or queue (PBS)."""
    account: Text | None = None
    """Account or project that is charged."""
    qos: Text | None = None
    """Quality of service."""
    constraint: Text | None = None
    """Features that the nodes must have."""
    include: Hosts = ()
    """Hosts that must be among the nodes."""
    exclude: Hosts = ()
    """Hosts that must not be among the nodes."""
    reservation: Text | None = None
    """Reservation to run in."""
    exclusive: bool = False
    """Share the nodes with no other job."""
    array: Text | None = None
    """Job array, such as 0-7 or 0-99%4."""
    mail: Text | None = None
    """Address to write to when the job ends or fails."""
    output: Text | None = None
    """The scheduler's own log. Default: in the run's folder."""
    error: Text | None = None
    """The scheduler's own error log. Default: joined with output."""
    directives: Lines = ()
    """Further directives, passed on word for word, without the leading #SBATCH or #PBS."""


class Launch(Section):
    """How the ranks are started."""

    launcher: Literal["torchrun", "direct", "legacy"] = "torchrun"
    """torchrun: one agent per node; direct: the scheduler starts each rank; legacy:
    torch.distributed.launch."""
    launcher_args: Words = ()
    """Further arguments of the launcher, passed on word for word."""
    nproc_per_node: Ranks = "auto"
    """Ranks on each node: a number, gpu (one per GPU), cpu (one per CPU), or auto (GPUs, else one)."""
    backend: Literal["nccl", "gloo"] | None = None
    """Process-group backend. Default: nccl where there are GPUs, else gloo."""
    max_restarts: Count = 0
    """How often the ranks are started anew after one has failed."""
    restart_delay: Seconds = 1.0
    """Seconds before the second restart in a row; each further one waits twice as long. The
    first waits none."""
    stop_timeout: Seconds = 30.0
    """Seconds that ranks get to leave after SIGTERM before they are killed."""
    master_addr: Text | None = None
    """Address that the ranks rendezvous at. Default: found out."""
    master_port: Annotated[int, Field(ge=1, le=65535), BeforeValidator(_number)] | None = None
    """Port that the ranks rendezvous at. Default: a free one."""
    interface: Text | None = None
    """Network interface for gloo and NCCL. Default: the one that carries the route to the master."""
    warm: bool = True
    """Fork ranks from a process that has imported torch. Set to false for a script that must set
    variables such as OMP_NUM_THREADS before it imports torch."""


class Environment(Section):
    """What is set up before the ranks start."""

    variables: Variables = {}
    """Environment variables. Values of names that end in KEY, TOKEN, SECRET or PASSWORD are written
    nowhere."""
    modules: Words = ()
    """Environment modules to load."""
    conda: Text | None = None
    """Conda environment, by name or path."""
    venv: Text | None = None
    """Virtual environment, by path."""
    python: Words = ()
    """Interpreter of the ranks, with options if need be. Default: python of the conda or virtual
    environment, else the interpreter that runs allranks."""
    setup: Lines = ()
    """Shell lines that run once, before the nodes are started; on one machine, before modules and conda."""
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
    max_attempts: Positive = 10
    """Attempts after which the run is given up."""


class Runs(Section):
    """Where and how the record of the run is kept."""

    folder: Text = "runs"
    """Folder that holds a folder for each run; relative to where the command is typed."""
    group_readable: bool = False
    """Let the group read the run's folder; otherwise only its owner can."""


class Job(Section):
    """A job: a script, its arguments, resources and environment."""

    name: Annotated[str, BeforeValidator(_text), Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """Name of the job. Default: the script's."""
    script: Text | None = None
    """Python script to run; relative to the working directory."""
    module: Text | None = None
    """Python module to run instead of a script, as with python -m."""
    binary: Text | None = None
    """Program to run instead of a script, without Python."""
    args: Words = ()
    """Arguments of the script."""
    workdir: Text = "."
    """Working directory of the ranks; relative to the job file."""
    cluster: Text = "local"
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

    kind: Text
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
