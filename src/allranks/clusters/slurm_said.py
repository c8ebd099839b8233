"""Slurm's own log of a run: where it is, and what of it tells a cause."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.queued_log import lines_of, plan_of, telling, with_text

if TYPE_CHECKING:
    from allranks.runs.record import Run

#: What sbatch replaces in the name of a log: %j, %4t, and %% for a %.
_REPLACED = re.compile(r"%(%|\d*[A-Za-z])")
#: What says nothing of the cause: how srun and Slurm ended the other tasks, and what our own scripts tell besides.
_NOISE = re.compile(
    r"srun: (?:error: \S+: tasks? \S+: |launch/slurm: |(?:Force )?Terminat|Job step aborted)"
    r"|slurmstepd\S*: error: \*\*\* |allranks: (?:node \d+: \w+=|(?:an|no )other attempt)"
)


def log_of(run: Run) -> Path | None:
    """Return the log of a run's newest attempt, if there is one: the agent's, inside an allocation."""
    job = run.job_id
    if run.record.handle.job_id is None or job is None:
        log = run.node_folder(0) / contract.AGENT_LOG
        return log if log.exists() else None
    return find_log(run.folder, job)


def causes(log: Path) -> list[str]:
    """Return the last lines of a log that may tell a cause; its last line if none may."""
    return telling(log, _NOISE) or [line for line in lines_of(log) if line.strip()][-1:]


def find_log(folder: Path, job_id: str) -> Path | None:
    """Return the log of a run's job that has text in it, if there is one: of errors, where the job asks for two."""
    asked, job = _asked(folder), job_id.partition(";")[0]
    # Where the folder's name fits into no directive, the plan names no log.
    default = f"{glob.escape(str(folder))}/slurm"
    patterns = [_pattern(asked[name], job, asked) for name in ("--error", "--output") if name in asked]
    for pattern in (*patterns, f"{default}-{'*' if '--array' in asked else job}.out", f"{default}.out"):
        if found := max(with_text(pattern), default=None):
            return found[1]
    return None


def _asked(folder: Path) -> dict[str, str]:
    """Return what sbatch was asked for."""
    return {reason["subject"]: reason["value"] for reason in plan_of(folder).get("reasons", ())}


def _pattern(name: str, job: str, asked: dict[str, str]) -> str:
    """Return the pattern of what sbatch makes of a log's name; each task of an array has an id of its own."""
    known = {"%%": "%"} | ({} if "--array" in asked else {"%j": glob.escape(job), "%A": glob.escape(job)})
    return _REPLACED.sub(lambda found: known.get(found[0], "*"), glob.escape(name))
