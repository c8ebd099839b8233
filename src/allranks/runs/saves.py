"""What a run's folder says of the checkpoints that ``ctx.checkpoints()`` has written: how far the training is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from allranks import contract


@dataclass(frozen=True)
class Save:
    """A checkpoint, or the start of an attempt.

    Attributes:
        attempt: that has written it.
        step: the steps done.
        path: of the checkpoint, as rank 0 names it; None for the start of an attempt.
        leaving: whether all ranks left then, to be continued from there.
    """

    attempt: int
    step: int
    path: str | None
    leaving: bool


def read_saves(run: Path) -> list[Save]:
    """Return what is noted in a run's folder, oldest first; nothing by scripts that save in their own way."""
    try:
        lines = (run / contract.CHECKPOINTS_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
            path = record["path"]
            save = Save(int(record["attempt"]), int(record["step"]), path and str(path), bool(record["leaving"]))
        except (ValueError, KeyError, TypeError):
            continue  # Cut off by the end of its writer.
        found.append(save)
    return found
