"""Every option of a job that has a flag, declared once.

Made from this table are the command line, the environment variables that are read, the place of a value that ``allranks
plan --sources`` shows, and the hint for a key that is spelled like its flag. ``allranks --help`` imports it: it must
stay quick.
"""

from __future__ import annotations

from typing import NamedTuple

#: No value of the job: ``DEBUG`` turns on ``debug``, every other level says nothing.
LOG_LEVEL_PATH = "log_level"

#: What can be started. A job has one of them.
TARGETS = ("script", "module", "binary")

#: What the command line calls the values that it takes beside the options of the table.
TARGET_FLAGS = {"script": "command line", "module": "--module", "binary": "--binary", "args": "command line"}


class Option(NamedTuple):
    """An option: where its value goes in the job and the spellings that give it."""

    path: str  # Place in the job, such as launch.nproc_per_node; each path stands once in the table.
    flags: tuple[str, ...]  # Spellings on the command line, the main one first.
    metavar: str  # What stands for the value in the help; empty for a flag without a value.
    help: str  # One line.
    off_flag: str | None = None  # The flag that says no, such as --no-warm, for a flag without a value.
    multiple: bool = False  # Whether the flag may be given several times: its value is a tuple of texts.
    established: tuple[str, ...] = ()  # Environment variables that people already use for this.

    @property
    def is_flag(self) -> bool:
        """Whether it is given without a value."""
        return not self.metavar

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables that give it; the first one that is set counts."""
        if self.path == "environment.variables":
            return ()  # One variable cannot hold many; those of the calling environment are there anyway.
        return ("ALLRANKS_" + self.flags[0].lstrip("-").replace("-", "_").upper(), *self.established)


OPTIONS: tuple[Option, ...] = (
    # --- the job ---
    Option("name", ("--name", "--job-name", "-J"), "NAME", "Name of the job. Default: the script's."),
    Option(
        "cluster",
        ("--on", "--cluster"),
        "CLUSTER",
        "Cluster to run on: local, or a name from clusters.yaml.",
        established=("ALLRANKS_CLUSTER",),
    ),
    Option("workdir", ("--workdir", "--chdir", "-D"), "DIR", "Working directory of the ranks."),
    Option("debug", ("--debug",), "", "Enable debug logs of NCCL and torch, and checks of collectives."),
    Option(LOG_LEVEL_PATH, ("--log-level",), "LEVEL", "DEBUG is the same as --debug; other levels change nothing."),
    # --- resources ---
    Option(
        "resources.nodes",
        ("--nnodes", "--nodes", "-N"),
        "N|MIN:MAX|HOSTS",
        "Number of nodes, MIN:MAX, or machines as in --hosts.",
    ),
    Option("resources.spares", ("--spares",), "N", "Standby machines, each to replace one that is lost."),
    Option("resources.hosts", ("--hosts",), "HOSTS", "Machines to run on over SSH: gpu[1-3], user@host:port."),
    Option("resources.hostfile", ("--hostfile",), "FILE", "File with such machines, one per line."),
    Option("resources.gpus_per_node", ("--gpus-per-node",), "N", "GPUs on each node."),
    Option("resources.gpu_type", ("--gpu-type",), "TYPE", "Type of GPU as the cluster names it, such as a100."),
    Option("resources.cpus_per_node", ("--cpus-per-node",), "N", "CPUs on each node, shared by its ranks."),
    Option("resources.memory", ("--mem", "--memory"), "SIZE", "Memory per node, such as 200GB."),
    Option("resources.time", ("--time", "-t"), "TIME", "Time limit: 48:00:00, 2-12:00, 30min."),
    # --- launch ---
    Option(
        "launch.nproc_per_node",
        ("--nproc-per-node",),
        "N|gpu|cpu|auto",
        "Ranks on each node: a number, gpu, cpu, or auto (GPUs, else one).",
        established=("NPROC_PER_NODE",),
    ),
    Option("launch.launcher", ("--launcher",), "torchrun|direct|legacy", "How the ranks of a node are started."),
    Option(
        "launch.agent",
        ("--agent",),
        "",
        "Start ranks with allranks' agent (the default), or with torchrun itself.",
        off_flag="--no-agent",
    ),
    Option(
        "launch.backend",
        ("--backend",),
        "nccl|gloo",
        "Process-group backend. Default: nccl where there are GPUs, else gloo.",
        established=("BACKEND",),
    ),
    Option("launch.max_restarts", ("--max-restarts",), "N", "Maximum number of restarts after a failure."),
    Option("launch.restart_delay", ("--restart-delay",), "SECONDS", "Wait before the second restart in a row."),
    Option("launch.stop_timeout", ("--stop-timeout",), "SECONDS", "Grace period between SIGTERM and SIGKILL."),
    Option("launch.hang_timeout", ("--hang-timeout",), "TIME|off", "Time without progress after which a run hangs."),
    Option("launch.on_hang", ("--on-hang",), "report|restart|end", "What follows the report of a hang."),
    Option(
        "launch.master_addr",
        ("--master-addr",),
        "ADDRESS",
        "Address of the rendezvous. Default: that of the first node.",
        established=("MASTER_ADDR",),
    ),
    Option(
        "launch.master_port",
        ("--master-port",),
        "PORT",
        "Port of the rendezvous. Default: a free one.",
        established=("MASTER_PORT",),
    ),
    Option(
        "launch.attach", ("--attach",), "", "Over SSH: end the run when this command exits.", off_flag="--no-attach"
    ),
    Option("launch.stdin", ("--stdin",), "RANK", "Connect this rank to the terminal or pipe; pdb works in it."),
    Option("launch.interface", ("--interface",), "NAME", "Network interface for gloo and NCCL."),
    Option(
        "launch.warm",
        ("--warm",),
        "",
        "Fork ranks from a process that has imported torch (the default), or start one interpreter each.",
        off_flag="--no-warm",
    ),
    # --- environment ---
    Option(
        "environment.variables",
        ("--env",),
        "NAME[=VALUE]",
        "Environment variable of the ranks; NAME alone passes on the one set here.",
        multiple=True,
    ),
    Option("environment.modules", ("--modules",), "NAMES", "Environment modules to load."),
    Option(
        "environment.conda",
        ("--conda", "--conda-env"),
        "NAME|PATH",
        "Conda environment, by name or path.",
        established=("CONDA_ENV",),
    ),
    Option("environment.venv", ("--venv",), "PATH", "Virtual environment, by path."),
    Option("environment.python", ("--python",), "COMMAND", "Python interpreter of the ranks, with options if needed."),
    # --- scheduler ---
    Option("scheduler.partition", ("--partition", "--queue", "-p"), "NAME", "Partition or queue."),
    Option(
        "scheduler.parallel_environment",
        ("--parallel-environment", "--pe"),
        "NAME",
        "Parallel environment of the job, on Grid Engine.",
    ),
    Option("scheduler.account", ("--account", "-A"), "NAME", "Account to charge."),
    Option("scheduler.project", ("--project",), "NAME", "Project of the job, on PBS and Grid Engine."),
    Option("scheduler.qos", ("--qos", "-q"), "NAME", "Quality of service."),
    Option("scheduler.constraint", ("--constraint", "-C"), "FEATURES", "Features that the nodes must have."),
    Option("scheduler.include", ("--include", "--nodelist", "-w"), "HOSTS", "Hosts that must be among the nodes."),
    Option("scheduler.exclude", ("--exclude", "-x"), "HOSTS", "Hosts that must not be among the nodes."),
    Option("scheduler.reservation", ("--reservation",), "NAME", "Reservation to run in."),
    Option("scheduler.exclusive", ("--exclusive",), "", "Share the nodes with no other job."),
    Option("scheduler.array", ("--array",), "RANGES", "Job array, such as 0-7 or 0-99%4."),
    Option("scheduler.output", ("--output",), "PATH", "The scheduler's own log. Default: in the run's directory."),
    Option("scheduler.error", ("--error",), "PATH", "The scheduler's own error log. Default: with output."),
    Option(
        "scheduler.directives",
        ("--directive",),
        "TEXT",
        "Further directive for the scheduler, passed on verbatim.",
        multiple=True,
    ),
    # --- another attempt ---
    Option(
        "retry.requeue",
        ("--requeue",),
        "",
        "Requeue at the time limit, on preemption and after a node failure.",
        off_flag="--no-requeue",
    ),
    Option(
        "retry.on",
        ("--retry-on",),
        "END",
        "Start another attempt after this end: node, preemption or hardware; may be given several times.",
        multiple=True,
    ),
    # --- notifications ---
    Option("notify.mail", ("--mail-user",), "ADDRESS", "Email address that the scheduler writes to."),
    # --- machines without a shared directory ---
    Option("sync.method", ("--sync",), "none|rsync", "Over SSH: copy the working directory to each machine first."),
    # --- the record ---
    Option("runs.folder", ("--runs-folder",), "DIR", "Directory of all runs."),
    Option("runs.group_readable", ("--group-readable",), "", "Let the group read the run's directory."),
)
