"""A run on other machines, held by the command that has started it."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters import agents
from allranks.clusters.happened import Happened
from allranks.clusters.ssh_agents import tell
from allranks.clusters.ssh_attach import Attached
from allranks.runs.record import newest_attempt
from allranks.runs.status import Handle

if TYPE_CHECKING:
    from allranks.clusters.ssh import SshCluster

#: How often what the agents tell is read: on a shared filesystem each look costs.
_READ_SECONDS = 0.3


class SshRun:
    """A run that was just started on several machines. Waiting for it is reading what its agents tell."""

    def __init__(
        self,
        cluster: SshCluster,
        folder: Path,
        handle: Handle,
        news: Sequence[str] = (),
        *,
        is_plain: bool = False,
        attached: Attached | None = None,
    ) -> None:
        self.handle, self.outlives = handle, attached is None
        self._attached = attached
        self._is_plain = is_plain
        self._news = [*news]
        self._happened = Happened(folder / contract.node_dir(newest_attempt(folder), 0))
        self._cluster, self._folder = cluster, folder
        self._has_ended = False
        self._next = 0.0

    def wait(self, seconds: float) -> bool:
        """Wait so long, unless the run has ended; tell whether it has."""
        if not self._has_ended:
            time.sleep(seconds)
        if not self._has_ended and time.monotonic() >= self._next:
            self._next = time.monotonic() + _READ_SECONDS
            status, told = self._cluster.look_at(self._folder, self.handle)
            self._news += self._happened.news()
            self._has_ended = status.state.is_final
            if not self._has_ended:
                self._end_those_who_do_not_hear(told)
            elif self._attached:
                self._attached.let_go()
        return self._has_ended

    def _end_those_who_do_not_hear(self, told: Mapping[Path, agents.Told]) -> None:
        """End the launchers of torch's own when one has failed: they do not hear of each other as agents do."""
        if self._is_plain and agents.has_one_failed(told):
            self._is_plain = False
            tell(self._cluster.reach, self.handle, self._folder, "TERM")

    def signal(self, number: int) -> None:
        """Pass a signal on to all agents."""
        tell(self._cluster.reach, self.handle, self._folder, signal.Signals(number).name.removeprefix("SIG"))

    def news(self) -> Sequence[str]:
        """Tell which machines do not take part, and what node 0's agent has told."""
        news, self._news = self._news, []
        if self._has_ended:
            news += self._cluster.missing(self._folder, self.handle)
        return news

    @property
    def awaited(self) -> str:
        """What is waited for until ranks run."""
        return "" if self._has_ended else self._happened.awaited
