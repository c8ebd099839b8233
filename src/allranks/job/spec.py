"""What a job file may say, typed.

Every field has a docstring: ``allranks schema`` and the reference page are made from them. They are read
from the source only then (see ``schema.py``): pydantic reading them here would take 28 ms of every command.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from allranks.job.fields import (
    Count,
    Duration,
    Hosts,
    Lines,
    Memory,
    Name,
    Names,
    Nodes,
    Port,
    Positive,
    Ranks,
    Seconds,
    Text,
    Variables,
    Words,
)


class Section(BaseModel):
    """A part of the job file: frozen, and every unknown key is an error."""

    # Inputs are hidden because pydantic's own messages would show the values of secrets.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    #: The field that a plain value in place of the section stands for, where that is allowed.
    short_for: ClassVar[str | None] = None


class Resources(Section):
    """What the job needs."""

    nodes: Nodes = (1, 1)
    """Number of nodes, or MIN:MAX for a job that runs on as many as it gets."""
    spares: Count = 0
    """Further machines, over SSH, that wait to take the place of one that is lost: the last of hosts."""
    hosts: Hosts = ()
    """Machines to run on over SSH, such as gpu[1-4] or ada@gpu7:2222; the first ones, if nodes says fewer."""
    hostfile: Text | None = None
    """File with these machines instead, one a line, with slots=N behind it for the number of its ranks."""
    gpus_per_node: Count | None = None
    """GPUs on each node. Default: all that a local machine has; none on a scheduler."""
    gpu_type: Text | None = None
    """Type of GPU as the cluster names it, such as a100."""
    cpus_per_node: Positive | None = None
    """CPUs on each node, shared by its ranks. Default: on this machine those that this process may use;
    on a scheduler what the site gives."""
    memory: Memory | None = None
    """Memory per node, such as 200GB; a bare number is megabytes."""
    time: Duration | None = None
    """Longest run time: 48:00:00, 2-12:00, 30min; a bare number is minutes."""


class Scheduler(Section):
    """What a batch scheduler is told besides the resources; a cluster without a scheduler ignores it."""

    partition: Text | None = None
    """Partition (Slurm) or queue (PBS)."""
    account: Text | None = None
    """Account that is charged; on PBS also called a project at some sites: qsub -A."""
    project: Text | None = None
    """Project of the job, on PBS: qsub -P."""
    qos: Text | None = None
    """Quality of service."""
    constraint: Text | None = None
    """Features that the nodes must have; on PBS further resources of each chunk, such as gpu_model=a100, with Torque
    properties of the nodes."""
    resources: Lines = ()
    """Further resources of the whole job, on PBS: filesystems=home:eagle is asked for with -l."""
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """How Slurm is asked for GPUs: --gpus-per-node, or --gres=gpu:N where a site wants that."""
    include: Hosts = ()
    """Hosts that must be among the nodes."""
    exclude: Hosts = ()
    """Hosts that must not be among the nodes."""
    reservation: Text | None = None
    """Reservation to run in."""
    exclusive: bool = False
    """Share the nodes with no other job."""
    array: Text | None = None
    """Job array, such as 0-7 or 0-99%4. Each task has a folder of its own in the run's."""
    mail: Text | None = None
    """Address to write to when the job ends or fails."""
    output: Text | None = None
    """The scheduler's own log. Default: in the run's folder."""
    error: Text | None = None
    """The scheduler's own error log. Default: joined with output."""
    flavour: Literal["openpbs", "torque"] | None = None
    """Which PBS it is: openpbs, as PBS Pro too, or torque. Default: what its qstat says of itself."""
    start_with: Literal["pbs_tmrsh", "pbsdsh", "mpiexec", "ssh"] | None = None
    """What starts the nodes of a PBS job, from the first one. Default: the first of these that is there."""
    directives: Lines = ()
    """Further directives, passed on word for word, without the leading #SBATCH or #PBS."""


class Launch(Section):
    """How the ranks are started."""

    launcher: Literal["torchrun", "direct", "legacy"] = "torchrun"
    """torchrun: one agent per node; direct: the scheduler starts each rank; legacy:
    torch.distributed.launch."""
    agent: bool = True
    """false: with launcher torchrun, start torchrun itself on each node in place of an agent of ours. Nothing of
    allranks then runs in the ranks' environment, whose Python and PyTorch may be old."""
    launcher_args: Words = ()
    """Further arguments of the launcher, passed on word for word: those of torch.distributed.launch with
    legacy, those of torchrun without an agent, on Slurm those of srun, which starts the agents, or with direct
    the ranks, and on PBS those of pbs_tmrsh, pbsdsh, mpiexec or ssh."""
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
    master_port: Port | None = None
    """Port that the ranks rendezvous at. Default: a free one."""
    attach: bool = False
    """Over SSH: end the run when the command that started it is gone, as a run on one machine does."""
    stdin: Count | None = None
    """On this machine: the rank that reads the stdin of the command, a terminal (where pdb works) or a pipe.
    Default: the rank of a run that has only one."""
    interface: Text | None = None
    """Network interface for gloo and NCCL. Default: on one machine the loopback for gloo; on several
    nodes each takes the one that carries the route to the first node, and leaves NCCL alone where an
    InfiniBand or RoCE port is active."""
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
    """Shell lines that run once, before the nodes are started: over SSH on the first machine; on one machine, before
    modules and conda."""
    node_setup: Lines = ()
    """Shell lines that run on each node, before its ranks start."""
    container: Words = ()
    """Command that the node's command is put behind, such as [apptainer, exec, --nv, image.sif]."""


class Retry(Section):
    """What happens when an attempt ends before the training does."""

    requeue: bool = True
    """Put the job back into the queue when its ranks have saved and left, at its time limit or for a preemption, and
    when a node fails."""
    max_attempts: Positive = 10
    """Attempts after which the run is given up."""
    warn_before: Seconds = 120.0
    """Seconds before its time limit, and before a preemption that the site announces, at which the ranks
    get SIGUSR1 to save and leave; half of a time limit that is shorter than twice that. 0: never."""


class Sync(Section):
    """Where machines that are reached over SSH have the job from."""

    short_for: ClassVar[str | None] = "method"

    method: Literal["none", "rsync"] = "none"
    """none: all machines see the same folders; rsync: each gets a copy of the working directory first, and logs,
    events, metrics and checkpoints come back. `sync: rsync` is short for it."""
    folder: Text | None = None
    """Folder of the copy on each machine, relative to the home there. Default: allranks/, with the name of the
    working directory and a number."""
    exclude: Lines = ()
    """Patterns of rsync for what is not copied, beside what .gitignore names: /data/ or *.ckpt; one that begins with
    "+ " copies what others leave out."""
    max_size: Memory = 1 << 30
    """A working directory of which more than this would be copied is refused, with what is large in it."""


class Checks(Section):
    """What is checked before the ranks start, besides what always is."""

    skip: Names = ()
    """Checks that are left out, by name; those of the command line's --skip come to these."""
    folder: Text | None = None
    """Folder of executables that check each node, as plugins of Nagios do; relative to the file that names it."""
    variables: Names = ()
    """Environment variables that must be set on the nodes: jobs do not work at this site without them."""


class Runs(Section):
    """Where and how the record of the run is kept."""

    folder: Text = "runs"
    """Folder that holds a folder for each run; relative to where the command is typed."""
    group_readable: bool = False
    """Let the group read the run's folder; otherwise only its owner can."""


class Job(Section):
    """A job: a script, its arguments, resources and environment."""

    name: Name | None = None
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
    """Cluster to run on: local, or a name from clusters.yaml. Default: local; ssh for a job that names hosts."""
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
    sync: Sync = Sync()
    """Where machines that are reached over SSH have the job from."""
    checks: Checks = Checks()
    """What is checked before the ranks start, besides what always is."""
    runs: Runs = Runs()
    """Where and how the record of the run is kept."""


class Cluster(Section):
    """An entry of clusters.yaml: a kind of cluster, and defaults for the jobs that run there."""

    kind: Text
    """Kind of the cluster: local, ssh, pdsh, slurm, pbs, or what an installed extension adds."""
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
    sync: Sync = Sync()
    """Defaults for the section of that name in the job file."""
    checks: Checks = Checks()
    """Defaults for the section of that name in the job file."""
    runs: Runs = Runs()
    """Defaults for the section of that name in the job file."""
