"""What the script of a scheduler's job leaves in the run's folder: which job the run is now, and what was decided."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.runs.record import newest_attempt


def newest(folder: Path) -> Path:
    """Return the folder of a run's newest attempt."""
    return folder / contract.attempt_dir(newest_attempt(folder))


def current_job(folder: Path, first: str) -> str:
    """Return the id of the job that a run is now: of its newest attempt, or of the one that was queued after it.

    Args:
        folder: the run's.
        first: the job that was submitted, with its cluster if Slurm told one: a job itself does not know that.
    """
    attempt = newest(folder)
    found = str(decision_after(attempt).get("job") or "")
    with contextlib.suppress(OSError):
        found = found or (attempt / contract.JOB).read_text().strip()
    _, separator, cluster = first.partition(";")
    return f"{found}{separator}{cluster}" if found else first


def decision_after(attempt: Path) -> dict[str, Any]:
    """Return what was decided at the end of an attempt; nothing where nothing was."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((attempt / contract.AGAIN).read_text()))
    return {}


def has_run_out_of_time(attempt: Path) -> bool:
    """Tell whether an attempt was ended at its time limit: by when its script was, and when that is."""
    with contextlib.suppress(OSError, ValueError):
        terminated = attempt / contract.TERMINATED
        return terminated.stat().st_mtime >= int(terminated.read_text())
    return False
