"""The folder of checkpoints: made, tried out, and seen by which ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.errors import RankError

if TYPE_CHECKING:
    from allranks.runtime.context import Context


def prepare(ctx: Context, folder: Path, mark: str) -> bool:
    """Make the folder on rank 0 and write into it for a try; tell whether all ranks see and can write it.

    Raises:
        RankError: it cannot be made or written; on all ranks.
    """
    probe = folder / f".probe-{mark}"
    failure = _try(folder, probe) if ctx.is_main else None
    if failure := ctx.control.broadcast(failure):
        raise RankError(
            f"checkpoints cannot be written to {folder}",
            why=failure,
            fix="give ctx.checkpoints() a folder that rank 0 can write",
        )
    seen = all(ctx.control.gather(probe.exists() and os.access(folder, os.W_OK)))
    if ctx.is_main:
        probe.unlink(missing_ok=True)
    return seen


def _try(folder: Path, probe: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"1")
    except OSError as error:
        return error.strerror or str(error)
    return None
