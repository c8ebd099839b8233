"""Names that launcher, agent and runtime share: environment variables and files of a run.

Nothing here does anything; it is one place to look up a spelling.
"""

from __future__ import annotations

from typing import Final

# --- environment variables that every rank of ours gets, beside those of torchrun ---
RUN_ID: Final = "ALLRANKS_RUN_ID"
RUN_DIR: Final = "ALLRANKS_RUN_DIR"
ATTEMPT: Final = "ALLRANKS_ATTEMPT"
BACKEND: Final = "ALLRANKS_BACKEND"
#: "1" when somebody watches all ranks on a terminal: progress bars make sense although stdout is a file.
TERMINAL: Final = "ALLRANKS_TERMINAL"

# --- files of a run, relative to runs/<id>/ ---
JOB_FILE: Final = "job.yaml"
PLAN_FILE: Final = "plan.json"
RECORD_FILE: Final = "record.json"
CODE_DIR: Final = "code"
ATTEMPTS_DIR: Final = "attempts"
LATEST: Final = "latest"

# --- files of a node, relative to runs/<id>/attempts/000/node-000/ ---
AGENT_EVENTS: Final = "agent.jsonl"
AGENT_LOG: Final = "agent.log"
HEARTBEAT: Final = "heartbeat"
LOG_INDEX: Final = "lines.idx"

# --- kinds of events in agent.jsonl ---
AGENT_STARTED: Final = "agent-started"
RANKS_STARTED: Final = "ranks-started"
RANK_EXITED: Final = "rank-exited"
RESTART: Final = "restart"
STOP_REQUESTED: Final = "stop-requested"
ERROR: Final = "error"
ENDED: Final = "ended"

#: A variable whose name ends so holds a secret: its value is in no plan, script, record or log of ours.
SECRET_SUFFIXES: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def is_secret(name: str) -> bool:
    """Tell whether an environment variable of this name is taken to hold a secret."""
    return name.upper().endswith(SECRET_SUFFIXES)


def attempt_dir(attempt: int) -> str:
    """Folder of an attempt, relative to the run's folder: ``attempts/000``."""
    return f"{ATTEMPTS_DIR}/{attempt:03d}"


def node_dir(attempt: int, node: int) -> str:
    """Folder of a node in an attempt, relative to the run's folder: ``attempts/000/node-000``."""
    return f"{attempt_dir(attempt)}/node-{node:03d}"


def rank_log(rank: int, stream: str) -> str:
    """Name of a rank's log in its node's folder; ``stream`` is ``out`` or ``err``."""
    return f"rank-{rank}.{stream}"
