"""What launcher, agent and runtime share: environment variables and files of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

# --- environment variables that every rank of ours gets, beside those of torchrun ---
RUN_ID: Final = "ALLRANKS_RUN_ID"
RUN_DIR: Final = "ALLRANKS_RUN_DIR"
ATTEMPT: Final = "ALLRANKS_ATTEMPT"
BACKEND: Final = "ALLRANKS_BACKEND"
#: "1" when all ranks are watched on a terminal: progress bars make sense although stdout is a file.
TERMINAL: Final = "ALLRANKS_TERMINAL"

#: When the job will be ended, in seconds since 1970: ranks save and leave before.
END_TIME: Final = "ALLRANKS_END_TIME"
#: Exit code of a rank that has saved after a stop request and is to be started again: EX_TEMPFAIL of sysexits.h.
CONTINUE_LATER: Final = 75
#: A signal that comes twice within this time is one request: a terminal sends Ctrl-C to a command and its children, and
#: the command passes it on.
ONE_REQUEST_SECONDS: Final = 0.3
#: Key that an agent sets in the store of a generation when a rank of it is gone: the others stop waiting.
RANK_GONE: Final = "allranks/rank-gone"

#: Set for an agent whose stdin is held open by its launcher: when it closes, the launcher is gone.
LIFELINE: Final = "ALLRANKS_LIFELINE"
#: Its value where the agent waits for a byte from there before it starts ranks: the run is still being checked.
HELD: Final = "held"
#: The stdin of the command that started a run here: its descriptor, the rank that gets it (-1: none), and the command's
#: process id.
STDIN: Final = "ALLRANKS_STDIN_OF_COMMAND"
#: The file in which a rank counts its steps, for the agent of its node: see :mod:`allranks.runtime.progress`.
STEP_FILE: Final = "ALLRANKS_STEP_FILE"

#: Internal: the number of ranks of a job, ":", and the file to which its one rank writes what its first step uses,
#: instead of training: see :mod:`allranks.runtime.estimate`.
ESTIMATE: Final = "_ALLRANKS_ESTIMATE"

# --- what the supervisor of a batch job sets for the agents of its nodes, beside RUN_DIR and ATTEMPT ---
#: This node's place among the nodes, how many of them there are, and how many ranks this one has.
NODE_RANK: Final = "ALLRANKS_NODE_RANK"
NODE_COUNT: Final = "ALLRANKS_NODE_COUNT"
NODE_NPROC: Final = "ALLRANKS_NODE_NPROC"
#: Where the agents meet: the first node, and a port there.
RDZV_HOST: Final = "ALLRANKS_RDZV_HOST"
RDZV_PORT: Final = "ALLRANKS_RDZV_PORT"
#: How many CPUs the job has there, where the scheduler says so and lets ranks use more.
NODE_CPUS: Final = "ALLRANKS_NODE_CPUS"
OF_A_NODE: Final = (NODE_RANK, NODE_COUNT, NODE_NPROC, RDZV_HOST, RDZV_PORT)

#: Names of the variables that this node decided on for the run: network and threads of another one may differ.
DECIDED: Final = "ALLRANKS_DECIDED"

#: What ends a prompt in a rank's log when a line was typed behind it: a rank itself hardly ends a line so.
TYPED: Final = b"\r\n"

#: The URL of a run's webhook, which stands in no file.
NOTIFY_WEBHOOK: Final = "ALLRANKS_NOTIFY_WEBHOOK"

#: What belongs to one run: a command that runs inside a rank must not hand it on.
OF_A_RUN: Final = (
    RUN_ID,
    RUN_DIR,
    ATTEMPT,
    TERMINAL,
    LIFELINE,
    STDIN,
    STEP_FILE,
    END_TIME,
    DECIDED,
    NODE_CPUS,
    *OF_A_NODE,
)

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


def full_wait(seconds: int) -> int:
    """Return :func:`scaled_wait` in whole seconds, at least 1, for the kernel, ssh and bash."""
    return max(1, round(scaled_wait(seconds)))


#: How long agents wait for each other before they report which nodes are missing: healthy ones import torch meanwhile.
MISSING_SECONDS: Final = 5.0

# --- schedulers, as launcher and agent both see them ---
#: The script that sets a node up and becomes its agent, and the configurations of all agents and of the supervisor.
NODE_SCRIPT: Final = "node.sh"
NODE_SPEC: Final = "node.json"
BATCH_SPEC: Final = "supervisor.json"
#: Becomes Python on another node, where the one that follows may be elsewhere.
PYTHON_ON_NODE: Final = ("bash", "-c", 'exec "$(command -v "$0" python3 | head -n 1)" "$@"')
#: In the run's directory: the step of Slurm's that the ranks are, where a run was started inside an allocation.
STEP: Final = "step"
#: Ports for rendezvous lie below the range that outgoing connections take theirs from: 32768 and up on Linux.
FIRST_PORT: Final = 16384
PORTS: Final = 16000

# --- files of a run, relative to runs/<id>/ ---
JOB_FILE: Final = "job.yaml"
#: The events that the run notifies of, and how; only there if it does.
NOTIFY_FILE: Final = "notify.json"
PLAN_FILE: Final = "plan.json"
RECORD_FILE: Final = "record.json"
DIAGNOSIS_FILE: Final = "diagnosis.json"
#: A zip archive of what follows. A directory in runs of earlier versions, and where a batch script makes it by itself.
CODE: Final = "code"
#: Directories and files of the package that need Python alone, and what else a probe sends to nodes: it needs no more.
_SHARED_CODE: Final = ("__init__.py", "contract.py", "errors.py", "system")
PROBE_CODE: Final = (*_SHARED_CODE, "checks/__init__.py", "checks/collect")
#: Those that a run carries for its nodes: they need only Python and torch.
NODE_CODE: Final = (*_SHARED_CODE, "record", "agent", "runtime", "selftest", "lightning.py")
#: What those need in addition whose supervisor asks for a verdict, or that notify.
DIAGNOSIS_CODE: Final = ("diagnosis", "logs/__init__.py", "logs/cause.py")
#: The ends after which another attempt may follow: see ``retry.on`` in the job file.
NODE, PREEMPTION, HARDWARE = "node", "preemption", "hardware"
ATTEMPTS_DIR: Final = "attempts"
#: Lines of shell that set the secrets of a job, for its owner alone, where nothing else can bring them to it.
SECRETS_FILE: Final = "secrets.sh"
#: The key that the agents of a run prove to each other, and its ranks sign with: see :mod:`allranks.record.files`.
KEY_FILE: Final = "key"
#: How the directories of an array's tasks start; each is laid out like a run's.
TASK: Final = "task-"
LATEST: Final = "latest"
#: What rank 0 writes of the training: one line of JSON for each record.
METRICS_FILE: Final = "metrics.jsonl"
#: One line of JSON for each checkpoint that counts: what an attempt has achieved.
CHECKPOINTS_FILE: Final = "checkpoints.jsonl"

# --- files of an attempt on a scheduler, relative to runs/<id>/attempts/000/ ---
#: The job's id, its hosts in the order of their nodes' numbers, its exit code, the decision about another attempt.
JOB: Final = "job"
HOSTS: Final = "hosts"
EXIT: Final = "exit"
AGAIN: Final = "again.json"
#: The line with which an attempt starts in a batch script's own log: what is before it is of an earlier one.
ATTEMPT_STARTS: Final = "allranks: an attempt starts"
#: Marks an attempt whose script got SIGTERM: the scheduler has ended it. In it, when the time limit is or was reached,
#: in seconds since 1970.
TERMINATED: Final = "terminated"
#: Asks all agents of an attempt for the stacks of their ranks, each time it is written.
STACKS_REQUEST: Final = "stacks"
#: The commit of the user's code that an attempt was started with, and the diff to it.
CODE_RECORD: Final = "code.json"
CODE_DIFF: Final = "code.diff"
#: Marks an attempt that was cancelled before its launcher had started it.
CANCELLED: Final = "cancelled"
#: Marks an attempt that a person has started: attempts are counted from there.
RESUMED: Final = "resumed"

# --- files of a node, relative to runs/<id>/attempts/000/node-000/ ---
AGENT_EVENTS: Final = "agent.jsonl"
AGENT_LOG: Final = "agent.log"
HEARTBEAT: Final = "heartbeat"
USAGE: Final = "usage.json"
#: The same over the time of the attempt: see :mod:`allranks.record.usage`.
USAGE_HISTORY: Final = "usage.bin"
LOG_INDEX: Final = "lines.idx"
#: How the name of a file ends to which a rank writes its stack when it is asked for it.
STACKS_SUFFIX: Final = ".stacks"
#: How the name of a file ends in which a rank records where its time goes: see :mod:`allranks.record.steptime`.
TIMES_SUFFIX: Final = ".times"
#: The newest request for stacks that the node's agent has passed on, and to which processes.
STACKS: Final = "stacks.json"
#: How the name of a file starts that brings its environment to a task, which removes it; in the attempt's directory.
TASK_ENVIRONMENT: Final = "environment-"
#: How the name of a file ends in which a task's exit code and host stand, where its starter may lose the code.
TASK_EXIT: Final = ".exit"
#: The names of signals for the tasks of a node, a line each, where the scheduler lets nothing be started beside them.
TASK_SIGNALS: Final = "signals"
#: In the directory of a node whose task has ended unseen by the scheduler: its daemon there is gone or was restarted.
CUT_OFF: Final = "cut-off"
#: In place of a rank: all ranks of a node, whose output torch's own launcher puts together.
ALL_OF_A_NODE: Final = -1
#: In the directory of node 0, one line of JSON for each node whose agent could not be started: it will not come.
NOT_STARTED: Final = "not-started"

# --- kinds of events in agent.jsonl ---
AGENT_STARTED: Final = "agent-started"
SETTINGS: Final = "settings"
RANKS_STARTED: Final = "ranks-started"
RANK_EXITED: Final = "rank-exited"
#: What the node of the first rank that failed knows of it: lines for the diagnosis.
NODE_FACTS: Final = "node-facts"
RESTART: Final = "restart"
NODE_LOST: Final = "node-lost"
WAITING: Final = "waiting"
#: No rank of any node has advanced for too long, and where they stand; and that they advance again.
HANG: Final = "hang"
HANG_OVER: Final = "hang-over"
#: Nodes have not come for some seconds, and are waited for; none of them is missing any more where the list is empty.
MISSING: Final = "missing"
STOP_REQUESTED: Final = "stop-requested"
WARNED: Final = "warned"
ERROR: Final = "error"
#: A notification could not be sent.
NOTIFY_FAILED: Final = "notify-failed"
ENDED: Final = "ended"

#: A variable whose name ends so holds a secret: its value is in no plan, script, record or log of ours.
SECRET_SUFFIXES: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def is_secret(name: str) -> bool:
    """Return whether an environment variable of this name is taken to hold a secret."""
    return name.upper().endswith(SECRET_SUFFIXES)


def undecided(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what was decided for the run that this process is a rank of, if it is one."""
    decided = environ.get(DECIDED, "").split()
    return {name: value for name, value in environ.items() if name not in decided}


def installation() -> Path:
    """Return the package's directory where all of it is installed: a rank imports what the archive of its run has."""
    import allranks

    return next(folder for folder in map(Path, allranks.__path__) if folder.is_dir())


def attempt_dir(attempt: int) -> str:
    """Directory of an attempt, relative to the run's directory: ``attempts/000``."""
    return f"{ATTEMPTS_DIR}/{attempt:03d}"


def node_dir(attempt: int, node: int) -> str:
    """Directory of a node in an attempt, relative to the run's directory: ``attempts/000/node-000``."""
    return f"{attempt_dir(attempt)}/node-{node:03d}"


def rank_log(rank: int | Literal["*"], stream: str) -> str:
    """Name of a rank's log in its node's directory, or that of all its ranks; ``stream`` is ``out`` or ``err``."""
    return f"node.{stream}" if rank == ALL_OF_A_NODE else f"rank-{rank}.{stream}"


def rank_stacks(rank: int) -> str:
    """Name of the file in a node's directory to which a rank writes its stack."""
    return f"rank-{rank}{STACKS_SUFFIX}"


def rank_step(rank: int | Literal["*"]) -> str:
    """Name of the file in a node's directory in which a rank, or any rank, counts its steps: see :data:`STEP_FILE`."""
    return f"rank-{rank}.step"


def rank_error(rank: int, restart: int) -> str:
    """Name of the file in a node's directory with the error that ended a rank, as torch's ``@record`` writes it."""
    return f"rank-{rank}.error-{restart}.json"
