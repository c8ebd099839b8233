"""Results of ``allranks estimate`` for a script and its arguments: stored beside the runs, and shown by plans."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from allranks.record.files import write_json

#: Subject of its row in a plan.
SUBJECT = "memory per rank"
#: Its directory in the runs directory; run names do not start with a dot.
_FOLDER = ".estimates"


class Estimate(NamedTuple):
    """The estimate for one rank of a job.

    Attributes:
        ranks: number of ranks of the job.
        strategy: ``ddp`` or ``fsdp``.
        memory: peak of a rank in bytes, without CUDA's context.
        sends: bytes that a rank sends in a step.
    """

    ranks: int
    strategy: str
    memory: int
    sends: int


def keep(runs_folder: Path, command: Iterable[str], found: Iterable[Estimate]) -> None:
    """Store the estimates for a command and replace earlier ones; ``command`` is directory, script and arguments.

    Raises:
        OSError: the directory cannot be written.
    """
    path = _path(runs_folder, command)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(path, [each._asdict() for each in found], 0o600)


def kept(runs_folder: Path, command: Iterable[str], ranks: int) -> tuple[Estimate, float] | None:
    """Return the estimate for ``ranks`` ranks, and its time; None if there is none of this version."""
    try:
        path = _path(runs_folder, command)
        found = [Estimate(**each) for each in json.loads(path.read_text(encoding="utf-8"))]
        return next((each, path.stat().st_mtime) for each in found if each.ranks == ranks)
    except (OSError, ValueError, TypeError, StopIteration):
        return None


def _path(runs_folder: Path, command: Iterable[str]) -> Path:
    name = hashlib.sha256(os.fsencode("\0".join(command))).hexdigest()[:16]
    return runs_folder / _FOLDER / f"{name}.json"
