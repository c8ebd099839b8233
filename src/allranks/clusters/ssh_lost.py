"""Looks for agents on other machines that say nothing any more."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from allranks.clusters import agents
from allranks.clusters.agents import Told
from allranks.clusters.ssh_agents import on_nodes
from allranks.clusters.ssh_reach import Reach
from allranks.runs.status import Handle

_LOOK_SECONDS = 20.0
#: How often agents that say nothing are looked for.
_ASK_SECONDS = 5.0


class Lost:
    """Looks now and then for agents that say nothing any more."""

    def __init__(self, reach: Reach, folder: Path, handle: Handle) -> None:
        self._reach, self._handle = reach, handle
        self._place = on_nodes(handle, folder)
        self._next = 0.0
        self._found: set[Path] = set()

    def look(self, attempt: Path, told: Mapping[Path, Told]) -> set[Path]:
        """Return the folders of the nodes that have told no end, if the agents of all of these are gone.

        Agents hear of each other's end: one that is there while others have ended ends soon, and one that these say
        was lost is gone for them. All others are asked for by ssh; one whose machine cannot be reached is gone when
        its last heartbeat is old as well.

        Args:
            attempt: folder of the newest attempt.
            told: what each node's agent told of.
        """
        nodes = {attempt / f"node-{node['node']:03}": node for node in self._handle.extra.get("nodes", ())}
        open_ = {folder for folder in nodes if folder not in told or not told[folder].status.state.is_final}
        if self._found >= open_:
            return open_
        gone = agents.lost_folders(told)
        if open_ <= gone:
            return open_
        if time.monotonic() < self._next:
            return set()
        asked = open_ - gone
        is_quiet = all(self._age(folder) > agents.HEARTBEAT_IS_OLD for folder in asked)
        if {*nodes} - open_ <= gone and not is_quiet:
            return set()
        answers = self._reach.ask([nodes[folder] for folder in asked], self._place, "0", _LOOK_SECONDS)
        self._next = time.monotonic() + _ASK_SECONDS
        if all(is_quiet if answer.unreached else answer.code for answer in answers):
            # Looked at again after the processes: one may have told its end between the two looks; the next call hears.
            self._found = {folder for folder in open_ if not agents.told_by(folder).state.is_final}
        return self._found if self._found == open_ else set()

    def _age(self, folder: Path) -> float:
        """Return the seconds since a node's agent showed that it is alive, or was started."""
        age = agents.heartbeat_age(folder)
        return time.time() - float(self._handle.extra.get("began", 0)) if age is None else age
