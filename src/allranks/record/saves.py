"""The checkpoints of ``ctx.checkpoints()`` that a run's directory lists: how far the training is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from allranks import contract


@dataclass(frozen=True)
class SaveRecord:
    """A checkpoint, as rank 0 names its path, or the start of an attempt, without one.

    ``leaving``: all ranks exited then, to be resumed from there.
    """

    attempt: int
    step: int
    path: str | None
    leaving: bool


def read_saves(run: Path) -> list[SaveRecord]:
    """Return the checkpoints of a run, oldest first; none if its script saves in its own way."""
    try:
        lines = (run / contract.CHECKPOINTS_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
            path = record["path"]
            save = SaveRecord(int(record["attempt"]), int(record["step"]), path and str(path), bool(record["leaving"]))
        except (ValueError, KeyError, TypeError):
            continue  # Cut off by the end of its writer.
        found.append(save)
    return found
