"""Ends a run for another command, also while the one that launches it has not started it yet.

Until a handle is on record, only the launcher can find what it starts. So a command that cancels leaves a mark in the
attempt's folder, and reads the record after that. The launcher writes the handle, and looks for the mark after that. So
one of them sees what the other did; the one that removes the mark ends the run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.settle import settled
from allranks.runs.files import unwritable
from allranks.runs.record import Run, load
from allranks.runs.status import Handle

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind

#: So long a launcher may take to see the mark. One that was killed never does, and one that checks sees it afterwards.
_LAUNCHER_SECONDS = 5.0
#: What the end of a run that its launcher cancels may take beyond the ranks' own time to leave.
_END_SECONDS = 120.0


def cancel(run: Run, kind: ClusterKind) -> Run:
    """End a run, and return it with its status then: PENDING if its launcher has not got to starting it yet.

    Raises:
        LaunchError: it cannot be ended, or does not end.
        RunFolderError: its folder cannot be written.
    """
    if _has_begun(run):
        kind.cancel(run)
        return settled(run, kind)
    try:
        _mark(run).touch(run.record.file_mode)
    except OSError as error:
        raise unwritable(_mark(run), error) from error
    run = _heard(run)
    if run.record.status.state.is_final:
        return run
    if not _mark(run).exists() or (_has_begun(run) and not _take(run)):
        run = _ended_by_launcher(run)
    if not run.record.status.state.is_final:
        kind.cancel(run)
    return settled(run, kind)


class Cancelled:
    """Tells a launcher whether another command has cancelled its run; once that was so, always.

    Removes the mark, by which the other command knows that the launcher ends the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is = False

    def __call__(self) -> bool:
        """Look for the mark."""
        self._is = self._is or _take(self._run)
        return self._is


def _mark(run: Run) -> Path:
    return run.attempt_folder / contract.CANCELLED


def _take(run: Run) -> bool:
    """Remove the mark; tell whether it was there: for one of two that do so at the same time."""
    try:
        _mark(run).unlink()
    except OSError:
        return False
    return True


def _has_begun(run: Run) -> bool:
    return run.record.handle != Handle()


def _heard(run: Run) -> Run:
    """Wait until the launcher has removed the mark, or noted the run's end or the handle of what it has started."""
    deadline = time.monotonic() + _LAUNCHER_SECONDS
    while _mark(run).exists() and not (_has_begun(run) or run.record.status.state.is_final):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
        run = load(run.folder)
    return load(run.folder)


def _ended_by_launcher(run: Run) -> Run:
    """Wait until the launcher, which has removed the mark, has noted the run's end; at most until it is overdue."""
    deadline = time.monotonic() + run.record.stop_timeout + _END_SECONDS
    while not run.record.status.state.is_final and time.monotonic() < deadline:
        time.sleep(0.05)
        run = load(run.folder)
    return run
