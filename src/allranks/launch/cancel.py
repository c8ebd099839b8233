"""Cancel a run, also one that its launcher has not started yet.

Until a handle is on record, only the launcher can find what it starts. A command that cancels creates a mark in the
attempt's directory, then reads the record. The launcher writes the handle, then looks for the mark. So one of them sees
what the other did; the one that removes the mark ends the run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.launch.refresh import observed, settled
from allranks.record.files import unwritable
from allranks.runs.record import Run, load
from allranks.runs.status import NOT_STARTED, Handle, State, Status

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind

#: What a launcher may take to see the mark. One that checks sees it afterwards, and one that was killed never does.
_LAUNCHER_SECONDS = 5.0
#: What a launcher may take to end the run, beyond the ranks' own time to exit.
_END_SECONDS = 120.0


def cancel(run: Run, kind: ClusterKind) -> Run:
    """End a run, and return it with its status then; raise a LaunchError, or a RunFolderError, if that fails."""
    if _has_started(run):
        kind.cancel(run)
        return settled(run, kind)
    try:
        _mark(run).touch(run.record.file_mode)
    except OSError as error:
        raise unwritable(_mark(run), error) from error
    run = _wait_until(run, _LAUNCHER_SECONDS, lambda r: _has_started(r) or _has_ended(r) or not _mark(r).exists())
    if _has_ended(run):
        return run
    if not _mark(run).exists() or (_has_started(run) and not _take(run)):  # The launcher has seen it, and ends the run.
        run = _wait_until(run, run.record.stop_timeout + _END_SECONDS, _has_ended)
    if not _has_ended(run):
        kind.cancel(run)
        now = observed(load(run.folder), kind)
        if now.record.status.started is None and not _has_started(now):  # No rank has run, and so none has failed.
            return now.with_status(Status(State.CANCELLED, NOT_STARTED, exit_code=128 + signal.SIGTERM))
    return settled(run, kind)


def cancelled(run: Run) -> Callable[[], bool]:
    """Return a function that tells a launcher whether another command has cancelled its run; from then on always True.

    It removes the mark, by which the other command knows that the launcher ends the run.
    """
    is_cancelled = False

    def look() -> bool:
        nonlocal is_cancelled
        is_cancelled = is_cancelled or _take(run)
        return is_cancelled

    return look


def _mark(run: Run) -> Path:
    return run.attempt_folder / contract.CANCELLED


def _take(run: Run) -> bool:
    """Remove the mark; return whether it was there: True for one of two that do so at the same time."""
    try:
        _mark(run).unlink()
    except OSError:
        return False
    return True


def _has_started(run: Run) -> bool:
    return run.record.handle != Handle()


def _has_ended(run: Run) -> bool:
    return run.record.status.state.is_final


def _wait_until(run: Run, seconds: float, is_over: Callable[[Run], bool]) -> Run:
    """Wait for what the run's launcher writes, at most so long; return the run as it is then."""
    deadline = time.monotonic() + seconds
    while not is_over(run) and time.monotonic() < deadline:
        time.sleep(0.02)
        run = load(run.folder)
    return load(run.folder)
