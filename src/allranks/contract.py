"""What launcher, agent and runtime agree on: environment variables, files of a run, a node's orders.

One place to look up a spelling.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final, Literal

# --- environment variables that every rank of ours gets, beside those of torchrun ---
RUN_ID: Final = "ALLRANKS_RUN_ID"
RUN_DIR: Final = "ALLRANKS_RUN_DIR"
ATTEMPT: Final = "ALLRANKS_ATTEMPT"
BACKEND: Final = "ALLRANKS_BACKEND"
#: "1" when somebody watches all ranks on a terminal: progress bars make sense although stdout is a file.
TERMINAL: Final = "ALLRANKS_TERMINAL"

#: When the job will be ended, in seconds since 1970: ranks save and leave before.
END_TIME: Final = "ALLRANKS_END_TIME"
#: Exit code of a rank that was asked to stop, has saved and wants to be started again. It is EX_TEMPFAIL of
#: sysexits.h: a temporary failure, the user is invited to try again.
CONTINUE_LATER: Final = 75
#: A signal that comes twice within this time is one request: a terminal sends Ctrl-C to a command and its children, and
#: the command passes it on.
ONE_REQUEST_SECONDS: Final = 0.3
#: Exit code of an attempt that does not begin, because there were enough of them: EX_UNAVAILABLE of sysexits.h.
GIVEN_UP: Final = 69

#: Key that an agent sets in the store of a generation when a rank of it is gone: nobody is to be waited for any more.
RANK_GONE: Final = "allranks/rank-gone"

#: Set for an agent whose standard input is held open by its launcher: when it closes, the launcher is gone.
LIFELINE: Final = "ALLRANKS_LIFELINE"
#: The stdin of the command that started a run here: its descriptor, the rank that gets it (-1: none), and the command's
#: process id.
STDIN: Final = "ALLRANKS_STDIN_OF_COMMAND"

# --- what a script that a scheduler starts tells the agents of its nodes, beside RUN_DIR and ATTEMPT ---
#: This node's place among the nodes, how many of them there are, and how many ranks this one has.
NODE_RANK: Final = "ALLRANKS_NODE_RANK"
NODE_COUNT: Final = "ALLRANKS_NODE_COUNT"
NODE_NPROC: Final = "ALLRANKS_NODE_NPROC"
#: Where the agents meet: the first node, and a port there.
RDZV_HOST: Final = "ALLRANKS_RDZV_HOST"
RDZV_PORT: Final = "ALLRANKS_RDZV_PORT"
OF_A_NODE: Final = (NODE_RANK, NODE_COUNT, NODE_NPROC, RDZV_HOST, RDZV_PORT)

#: Names of the variables that this node decided on for the run: network and threads of another one may differ.
DECIDED: Final = "ALLRANKS_DECIDED"

#: What ends a prompt in a rank's log when a line was typed behind it: so a rank hardly ends a line that nobody typed.
TYPED: Final = b"\r\n"

#: What belongs to one run: a command that runs inside a rank must not hand it on.
OF_A_RUN: Final = (RUN_ID, RUN_DIR, ATTEMPT, TERMINAL, LIFELINE, STDIN, END_TIME, DECIDED, *OF_A_NODE)

# --- waits: patience with a process, silence of a peer, back-off ---
#: Internal, for the tests: waits of this process last this part of their real seconds. Above 0, at most 1.
WAITS: Final = "_ALLRANKS_WAITS"


def scaled_wait(seconds: float) -> float:
    """Return a wait as :data:`WAITS` scales it; the real one without that.

    Not for waits in which a healthy peer has to do something: a tenth of those fails on a slow machine.

    Raises:
        ValueError: :data:`WAITS` is invalid.
    """
    text = os.environ.get(WAITS, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor <= 1:
        raise ValueError(f"invalid {WAITS}: {text!r} (expected a number above 0, at most 1)")
    return seconds * factor


def whole_wait(seconds: int) -> int:
    """Return :func:`scaled_wait` in whole seconds, at least 1, for the kernel, ssh and bash.

    Raises:
        ValueError: :data:`WAITS` is invalid.
    """
    return max(1, round(scaled_wait(seconds)))


#: How long agents wait for each other before they tell which nodes are missing: healthy ones import torch meanwhile.
MISSING_SECONDS: Final = 5.0

# --- schedulers, as launcher and agent both see them ---
#: Kept when a job is submitted, or asked for, from inside another one: where Slurm or PBS itself is.
_OF_SCHEDULERS: Final = (
    *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT"),
    *("PBS_CONF_FILE", "PBS_SERVER", "PBS_DEFAULT", "PBS_EXEC", "PBS_HOME", "PBS_DPREFIX"),
)
#: Set for the tasks of a job, and read by the tools of Slurm as their options. Others of sbatch's are of who submitted.
_OF_A_JOB: Final = ("SLURM_", "SRUN_", "SBATCH_MEM_BIND", "SBATCH_CPU_BIND", "PMI_", "PMIX_", "PBS_")
#: The batch scripts, in the run's folder.
SBATCH_SCRIPT: Final = "script.sbatch"
PBS_SCRIPT: Final = "script.pbs"


def outside_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out what belongs to the job that this process may itself run in: it would leak into a new one."""
    return {name: value for name, value in environ.items() if name in _OF_SCHEDULERS or not name.startswith(_OF_A_JOB)}


# --- files of a run, relative to runs/<id>/ ---
JOB_FILE: Final = "job.yaml"
PLAN_FILE: Final = "plan.json"
RECORD_FILE: Final = "record.json"
#: A zip archive of what follows. A folder in runs of earlier versions, and where a batch script makes it by itself.
CODE: Final = "code"
#: Folders and files of the package that need Python alone: what looks at a node is sent to it with them.
PROBE_CODE: Final = (
    "__init__.py",
    "contract.py",
    "errors.py",
    "hostlist.py",
    "processes.py",
    "routes.py",
    "probe",
)
#: Those that a run carries for its nodes: they need only Python and torch.
NODE_CODE: Final = (
    *PROBE_CODE,
    "trial",
    "agent",
    "runtime",
    "runs",
)
ATTEMPTS_DIR: Final = "attempts"
#: Lines of shell that set the secrets of a job, for its owner alone, where nothing else can bring them to it.
SECRETS_FILE: Final = "secrets.sh"
#: The key that the agents of a run prove to each other, and its ranks sign with: see :mod:`allranks.runs.key`.
KEY_FILE: Final = "key"
#: How the folders of an array's tasks begin; each is laid out like a run's.
TASK: Final = "task-"
LATEST: Final = "latest"
#: What rank 0 writes of the training: one line of JSON for each record.
METRICS_FILE: Final = "metrics.jsonl"
#: One line of JSON for each checkpoint that counts: what an attempt has achieved.
CHECKPOINTS_FILE: Final = "checkpoints.jsonl"

# --- files of an attempt on a scheduler, relative to runs/<id>/attempts/000/ ---
#: The job's id, its exit code, and what was decided about another attempt.
JOB: Final = "job"
EXIT: Final = "exit"
AGAIN: Final = "again.json"
#: How long the logs of the script were when the attempt began: a line for each, with the size and the path.
LOGS_BEFORE: Final = "logs-before"
#: Marks an attempt whose script got SIGTERM: the scheduler has ended it. In it, when the time limit is or was reached,
#: in seconds since 1970.
TERMINATED: Final = "terminated"
#: Marks an attempt that was cancelled before its launcher had started it.
CANCELLED: Final = "cancelled"
#: Marks an attempt that a person has begun: attempts are counted from there.
RESUMED: Final = "resumed"

# --- files of a node, relative to runs/<id>/attempts/000/node-000/ ---
AGENT_EVENTS: Final = "agent.jsonl"
AGENT_LOG: Final = "agent.log"
HEARTBEAT: Final = "heartbeat"
USAGE: Final = "usage.json"
LOG_INDEX: Final = "lines.idx"
#: How the name of a file begins that brings its environment to a task, which removes it; in the attempt's folder.
TASK_ENVIRONMENT: Final = "environment-"
#: How the name of a file ends in which a task's exit code and host stand, where its starter may lose the code.
TASK_EXIT: Final = ".exit"
#: In the folder of a node whose task has ended unseen by the scheduler: its daemon there is gone or was restarted.
CUT_OFF: Final = "cut-off"
#: In place of a rank: all ranks of a node, whose output torch's own launcher puts together.
ALL_OF_A_NODE: Final = -1
#: In the folder of node 0, one line of JSON for each node whose agent could not be started: it will not come.
NOT_STARTED: Final = "not-started"

# --- kinds of events in agent.jsonl ---
AGENT_STARTED: Final = "agent-started"
SETTINGS: Final = "settings"
RANKS_STARTED: Final = "ranks-started"
RANK_EXITED: Final = "rank-exited"
RESTART: Final = "restart"
NODE_LOST: Final = "node-lost"
WAITING: Final = "waiting"
#: Nodes have not come for some seconds, and are waited for; none of them is missing any more where the list is empty.
MISSING: Final = "missing"
STOP_REQUESTED: Final = "stop-requested"
WARNED: Final = "warned"
ERROR: Final = "error"
ENDED: Final = "ended"

#: A variable whose name ends so holds a secret: its value is in no plan, script, record or log of ours.
SECRET_SUFFIXES: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def is_secret(name: str) -> bool:
    """Tell whether an environment variable of this name is taken to hold a secret."""
    return name.upper().endswith(SECRET_SUFFIXES)


def undecided(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out what was decided on for the run that this process is a rank of, if it is one."""
    decided = environ.get(DECIDED, "").split()
    return {name: value for name, value in environ.items() if name not in decided}


def installation() -> Path:
    """Return the package's folder where all of it is installed: a rank imports what the archive of its run has."""
    import allranks

    return next(folder for folder in map(Path, allranks.__path__) if folder.is_dir())


def attempt_dir(attempt: int) -> str:
    """Folder of an attempt, relative to the run's folder: ``attempts/000``."""
    return f"{ATTEMPTS_DIR}/{attempt:03d}"


def node_dir(attempt: int, node: int) -> str:
    """Folder of a node in an attempt, relative to the run's folder: ``attempts/000/node-000``."""
    return f"{attempt_dir(attempt)}/node-{node:03d}"


def rank_log(rank: int | Literal["*"], stream: str) -> str:
    """Name of a rank's log in its node's folder, or that of all its ranks; ``stream`` is ``out`` or ``err``."""
    return f"node.{stream}" if rank == ALL_OF_A_NODE else f"rank-{rank}.{stream}"


def rank_error(rank: int, restart: int) -> str:
    """Name of the file in a node's folder with the error that ended a rank, as torch's ``@record`` writes it."""
    return f"rank-{rank}.error-{restart}.json"


@dataclass(frozen=True)
class NodeSpec:
    """The orders of one node's agent, as JSON in the run's folder. It holds no value of any variable."""

    run_id: str
    run_dir: str
    attempt: int
    node: int
    nnodes: int
    nproc_per_node: int
    kind: Literal["script", "module", "binary"]
    #: Absolute path of the script or binary, or name of the module.
    target: str
    args: tuple[str, ...]
    #: Interpreter options of the ranks, such as -O; ranks with options start as plain interpreters.
    python_options: tuple[str, ...]
    warm: bool
    max_restarts: int
    restart_delay: float
    stop_timeout: float
    master_addr: str
    #: None: a free one.
    master_port: int | None
    #: Permission bits of the files that the agent creates.
    file_mode: int
    #: With fewer nodes than this the job cannot go on.
    min_nodes: int = 1
    #: How many of the nodes wait to take the place of one that is lost: the last ones, at first.
    spares: int = 0

    @property
    def places(self) -> int:
        """How many nodes take part, at most."""
        return self.nnodes - self.spares

    @property
    def needs_all(self) -> bool:
        """Whether the job cannot go on without any of its nodes."""
        return self.min_nodes >= self.nnodes

    def to_json(self) -> str:
        """Return the orders as indented JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> NodeSpec:
        """Read what :meth:`to_json` wrote, in an earlier version too: a run may be resumed with a later one."""
        names = {field.name for field in fields(cls)}
        raw = {name: value for name, value in json.loads(text).items() if name in names}
        lists = {"args": tuple(raw["args"]), "python_options": tuple(raw["python_options"])}
        return cls(**{**raw, **lists})
