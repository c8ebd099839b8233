"""The folder of checkpoints: made, tried out, and seen by which ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.errors import RankError

if TYPE_CHECKING:
    from allranks.runtime.context import Context


def prepare(ctx: Context, probe: Path, tidy: Callable[[], None]) -> bool:
    """Make the folder on rank 0 and write into it for a try; tell whether all ranks see and can write it.

    Args:
        ctx: the context.
        probe: a folder in that of the checkpoints, named as a save that is being written: if this process is killed
            now, the next one removes it with what else saves have left.
        tidy: removes that. It comes first, since what a killed save has left may have filled the disk.

    Raises:
        RankError: it cannot be made or written; on all ranks.
    """
    folder = probe.parent
    failure = _try(probe, tidy) if ctx.is_main else None
    if failure := ctx.control.broadcast(failure):
        raise RankError(
            f"checkpoints cannot be written to {folder}",
            why=failure,
            fix="free some space there, or give ctx.checkpoints() a folder that rank 0 can write",
        )
    seen = all(ctx.control.gather(probe.exists() and os.access(folder, os.W_OK)))
    if ctx.is_main:
        shutil.rmtree(probe, ignore_errors=True)
    return seen


def _try(probe: Path, tidy: Callable[[], None]) -> str | None:
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        tidy()
        probe.mkdir()
        (probe / "probe").write_bytes(b"1")
    except OSError as error:
        shutil.rmtree(probe, ignore_errors=True)
        return error.strerror or str(error)
    return None
