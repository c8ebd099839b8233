"""The verdict on a failed run, kept in its directory for those who report on the run later."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from allranks import contract
from allranks.diagnosis.model import Diagnosis
from allranks.diagnosis.sources import of_run
from allranks.errors import RunFolderError
from allranks.record.files import write_json
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.runs.record import Run


def has_failed(run: Run) -> bool:
    """Return whether a run has ended in a way that a verdict can explain: cancelled runs explain themselves."""
    state = run.record.status.state
    return state.is_final and state not in (State.SUCCEEDED, State.CANCELLED)


def verdict_on(run: Run) -> Diagnosis | None:
    """Return the verdict on the newest attempt of a failed run, as it was kept; None if nothing tells of a failure."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads((run.folder / contract.DIAGNOSIS_FILE).read_text(encoding="utf-8"))
        if kept["attempt"] == run.attempt:
            return Diagnosis.from_json(kept["diagnosis"]) if kept["diagnosis"] else None
    return judged(run)


def judged(run: Run) -> Diagnosis | None:
    """Return the verdict on the newest attempt of a run by the rules of today, and keep it.

    Raises:
        RunFolderError: a log cannot be read.
    """
    verdict = of_run(run)
    kept = {"attempt": run.attempt, "diagnosis": verdict and asdict(verdict)}
    with contextlib.suppress(RunFolderError):  # A user who may only read, or a full disk: it is found again.
        write_json(run.folder / contract.DIAGNOSIS_FILE, kept, run.record.file_mode)
    return verdict
