"""What a job file may say: its sections. The types of their values are in ``values.py``.

Every field has a docstring, of which ``allranks schema`` and the reference page are made. Only they read them from the
source (see ``schema.py``): pydantic reading them here would take 28 ms of every command.
"""

from __future__ import annotations

import os
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from allranks.job.values import (
    Command,
    Count,
    Duration,
    Ends,
    Events,
    HangTimeout,
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
    Webhook,
    Words,
)

#: The plugins of pydantic that a user has installed are for the user's models. To look for them would read the metadata
#: of all packages, and to load them takes up to a second; so they are off while the models of this module are made.
_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
_CHOSEN = os.environ.get(_PLUGINS)
os.environ[_PLUGINS] = "__all__"


class Section(BaseModel):
    """A part of the job file: frozen, and every unknown key is an error."""

    # Inputs are hidden because pydantic's own messages would show the values of secrets.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    #: The field that a plain value instead of the section stands for, where that is allowed.
    short_for: ClassVar[str | None] = None

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """Return the types of the fields that are sections themselves."""
        types = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: kind for name, kind in types.items() if isinstance(kind, type) and issubclass(kind, Section)}


class Resources(Section):
    """What the job needs."""

    nodes: Nodes = (1, 1)
    """Number of nodes, or MIN:MAX for a range."""
    spares: Count = 0
    """Standby machines over SSH, each to replace one that is lost: the last of hosts."""
    hosts: Hosts = ()
    """Machines to run on over SSH, such as gpu[1-4] or ada@gpu7:2222; the first ones, if nodes says fewer."""
    hostfile: Text | None = None
    """File with these machines instead, one per line, with slots=N behind it for the number of its ranks."""
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
    """Time limit: 48:00:00, 2-12:00, 30min; a bare number is minutes."""


class Scheduler(Section):
    """Options of the batch scheduler; ignored on a cluster without one."""

    #: Keys that only some schedulers have; each of those names them.
    of_some: ClassVar[frozenset[str]] = frozenset(
        ("parallel_environment", "project", "qos", "resources", "gpu_request", "flavour", "start_with")
    )

    partition: Text | None = None
    """Partition (Slurm) or queue (PBS, Grid Engine)."""
    parallel_environment: Text | None = None
    """Parallel environment, on Grid Engine: qsub -pe, with resources.cpus_per_node slots on each node."""
    account: Text | None = None
    """Account to charge; some PBS sites call it a project: qsub -A."""
    project: Text | None = None
    """Project of the job, on PBS and Grid Engine: qsub -P."""
    qos: Text | None = None
    """Quality of service."""
    constraint: Text | None = None
    """Features that the nodes must have; on PBS further resources of each chunk, such as gpu_model=a100, with Torque
    properties of the nodes."""
    resources: Lines = ()
    """Further resources of the whole job, on PBS: filesystems=home:eagle is requested with -l; on Grid Engine of each
    slot: gpu=1."""
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
    """Job array, such as 0-7 or 0-99%4. Each task has a directory of its own in the run's."""
    output: Text | None = None
    """The scheduler's own log. Default: in the run's directory."""
    error: Text | None = None
    """The scheduler's own error log. Default: joined with output."""
    flavour: Literal["openpbs", "torque"] | None = None
    """Which PBS it is: openpbs, as PBS Pro too, or torque. Default: what its qstat says of itself."""
    start_with: Literal["pbs_tmrsh", "pbsdsh", "mpiexec", "ssh"] | None = None
    """What starts the nodes of a PBS job, from the first one. Default: the first of these that is there. On
    Grid Engine ssh is taken instead of qrsh."""
    directives: Lines = ()
    """Further directives, passed on verbatim, without the leading #SBATCH, #PBS or #$."""


class Launch(Section):
    """How the ranks are started."""

    launcher: Literal["torchrun", "direct", "legacy"] = "torchrun"
    """torchrun: an agent on each node starts its ranks, as torchrun does; direct: the scheduler starts each rank;
    legacy: torch.distributed.launch."""
    agent: bool = True
    """false: with launcher torchrun, start torchrun itself on each node instead of an agent of ours. Nothing of
    allranks then runs in the ranks' environment, whose Python and PyTorch may be old."""
    launcher_args: Words = ()
    """Further arguments of the launcher, passed on word for word: those of torch.distributed.launch with
    legacy, those of torchrun without an agent, on Slurm those of srun, which starts the agents, or with direct
    the ranks, on PBS those of pbs_tmrsh, pbsdsh, mpiexec or ssh, and on Grid Engine those of qrsh -inherit."""
    nproc_per_node: Ranks = "auto"
    """Ranks on each node: a number, gpu (one per GPU), cpu (one per CPU), or auto (GPUs, else one)."""
    backend: Literal["nccl", "gloo"] | None = None
    """Process-group backend. Default: nccl where there are GPUs, else gloo."""
    max_restarts: Count = 0
    """Maximum number of restarts after a failure."""
    restart_delay: Seconds = 1.0
    """Delay in seconds before the second restart in a row, doubled for each further one. The first is immediate."""
    stop_timeout: Seconds = 30.0
    """Grace period in seconds between SIGTERM and SIGKILL."""
    hang_timeout: HangTimeout | None = None
    """After how long without a sign of progress of any rank (output, or a step of ctx) the run counts as hung: seconds,
    a duration such as 10min, or off. Default: ten times the usual time between two signs, at least 5 minutes."""
    on_hang: Literal["report", "restart", "end"] | None = None
    """What follows a hang, after the report of where the ranks stand: report: nothing; restart: all ranks restart,
    which counts against max_restarts; end: the run fails. Default: report, but end in the last 5 minutes of a time
    limit if no terminal shows the run."""
    master_addr: Text | None = None
    """Address of the rendezvous. Default: that of the first node."""
    master_port: Port | None = None
    """Port of the rendezvous. Default: a free one."""
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

    @property
    def is_direct(self) -> bool:
        """Whether the scheduler starts the ranks themselves, without agents."""
        return self.launcher == "direct"


class Environment(Section):
    """The environment of the ranks."""

    variables: Variables = {}
    """Environment variables. Values of names that end in KEY, TOKEN, SECRET or PASSWORD are never written to disk."""
    modules: Words = ()
    """Environment modules to load."""
    conda: Text | None = None
    """Conda environment, by name or path."""
    venv: Text | None = None
    """Virtual environment, by path."""
    python: Words = ()
    """Python interpreter of the ranks, with options if needed. Default: python of the conda or virtual
    environment, else the interpreter that runs allranks."""
    setup: Lines = ()
    """Shell lines that run once, before the nodes are started: over SSH on the first machine; on one machine, before
    modules and conda."""
    node_setup: Lines = ()
    """Shell lines that run on each node, before its ranks start."""
    container: Words = ()
    """Command that prefixes the node's command, such as [apptainer, exec, --nv, image.sif]."""


class Retry(Section):
    """When a run is requeued."""

    requeue: bool = True
    """Requeue the job when its ranks saved and exited, at its time limit or for a preemption, and when a node fails."""
    on: Ends = ("node", "preemption")
    """After which ends another attempt follows. node: a node was lost; preemption: the ranks saved and exited, at the
    time limit or for a preemption; hardware: a rank failed because of its node, such as a GPU that is lost, and Slurm
    leaves that node out. A failure of the script is never retried."""
    max_attempts: Positive = 10
    """Maximum number of attempts."""
    warn_before: Seconds = 120.0
    """Seconds before its time limit, and before a preemption that the site announces, at which the ranks
    get SIGUSR1 to save and leave; half of a time limit that is shorter than twice that. 0: never."""

    @property
    def by_scheduler(self) -> bool:
        """Whether the scheduler may requeue the job by itself: it does so for lost nodes and preemptions alike."""
        return self.requeue and bool({"node", "preemption"} & {*self.on})


class Notify(Section):
    """Who is notified of what happens to the run, and how."""

    on: Events = ("failure", "requeue", "end")
    """Of which events. start: an attempt starts; failure: the run failed; requeue: another attempt follows, or all
    ranks restart; end: the run ended, however."""
    command: Command = ()
    """Command that is run on the first node, in the working directory: a list of words, or a line for sh. It gets the
    event as JSON on stdin, and the variables ALLRANKS_NOTIFY_EVENT, _RUN, _STATE and _TEXT."""
    webhook: Webhook | None = None
    """URL to which the event is sent as JSON, by POST from the first node; its field text is what Slack, Mattermost and
    Teams show. It is a secret: it is never written to disk. ALLRANKS_NOTIFY_WEBHOOK gives it too."""
    mail: Text | None = None
    """Email address that the scheduler writes to; on PBS and Grid Engine not for a requeue."""


class Sync(Section):
    """How machines reached over SSH get the job."""

    short_for: ClassVar[str | None] = "method"

    method: Literal["none", "rsync"] = "none"
    """none: all machines see the same directories; rsync: each gets a copy of the working directory first, and logs,
    events, metrics and checkpoints come back. `sync: rsync` is short for it."""
    folder: Text | None = None
    """Directory of the copy on each machine, relative to the home there. Default: allranks/, with the name of the
    working directory and a number."""
    exclude: Lines = ()
    """Patterns of rsync for what is not copied, beside what .gitignore names: /data/ or *.ckpt; one that starts with
    "+ " copies what others leave out."""
    max_size: Memory = 1 << 30
    """A working directory of which more than this would be copied is refused, with what is large in it."""


class Checks(Section):
    """Checks before the ranks start, in addition to the built-in ones."""

    skip: Names = ()
    """Checks that are left out, by name; those of the command line's --skip come to these."""
    folder: Text | None = None
    """Directory of executables that check each node, as plugins of Nagios do; relative to the file that names it."""
    variables: Names = ()
    """Environment variables that must be set on the nodes: jobs do not work at this site without them."""


class Runs(Section):
    """Where runs are recorded."""

    folder: Text = "runs"
    """Directory of all runs; relative to where the command is typed."""
    group_readable: bool = False
    """Let the group read the run's directory; otherwise only its owner can."""


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
    """Enable debug logs of NCCL and torch, and consistency checks of collectives."""
    resources: Resources = Resources()
    """What the job needs."""
    launch: Launch = Launch()
    """How the ranks are started."""
    environment: Environment = Environment()
    """The environment of the ranks."""
    scheduler: Scheduler = Scheduler()
    """What a batch scheduler gets besides the resources."""
    retry: Retry = Retry()
    """When a run is requeued."""
    notify: Notify = Notify()
    """Who is notified of what happens to the run, and how."""
    sync: Sync = Sync()
    """How machines reached over SSH get the job."""
    checks: Checks = Checks()
    """Checks before the ranks start, in addition to the built-in ones."""
    runs: Runs = Runs()
    """Where runs are recorded."""


class Cluster(Section):
    """An entry of clusters.yaml: a kind of cluster, and defaults for the jobs that run there."""

    kind: Text
    """Kind of the cluster: local, ssh, pdsh, slurm, pbs, grid_engine, or what an installed extension adds."""
    # Defaults for the sections of these names in the job file.
    resources: Resources = Resources()
    launch: Launch = Launch()
    environment: Environment = Environment()
    scheduler: Scheduler = Scheduler()
    retry: Retry = Retry()
    notify: Notify = Notify()
    sync: Sync = Sync()
    checks: Checks = Checks()
    runs: Runs = Runs()


if _CHOSEN is None:
    del os.environ[_PLUGINS]
else:
    os.environ[_PLUGINS] = _CHOSEN
