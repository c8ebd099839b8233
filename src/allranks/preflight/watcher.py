"""Who looks on while a trial goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allranks.clusters.base import Started
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run


class Watcher:
    """Looks on while a trial goes on; this one does nothing."""

    def interrupted(self) -> int:
        """Return the number of the signal that has asked for the trial's end before it was started; 0: none has."""
        return 0

    def attach(self, run: Run, plan: Plan, started: Started) -> None:
        """Be told that it was started: signals can be passed on."""

    def news(self, run: Run, lines: Sequence[str]) -> None:
        """Be told what has happened since."""
