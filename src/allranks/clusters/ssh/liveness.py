"""Follow a run on other machines, find lost agents, and end it with the command that started it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.ssh import multiplexing
from allranks.clusters.ssh.transport import Ssh, folder_on_nodes
from allranks.runs import agents
from allranks.runs.agents import NodeReport
from allranks.runs.news import Happened
from allranks.runs.record import newest_attempt
from allranks.runs.status import Handle

if TYPE_CHECKING:
    from allranks.clusters.ssh import SshCluster

#: How long a machine may take to report whether an agent is there, and how often silent agents are probed.
_POLL_SECONDS, _QUERY_SECONDS = 20.0, 5.0
#: The age of two heartbeats: a machine that neither the others nor this one reaches is not waited for any longer.
_LOST_SECONDS = contract.scaled_wait(10.0)
#: How often what the agents report is read: on a shared filesystem each read costs.
_READ_SECONDS = 0.3
#: How often this process signals each machine that it is alive; ``end.sh`` has the patience of a machine.
_BEAT_SECONDS = contract.scaled_wait(5.0)


class Liveness:
    """Probes now and then agents that report nothing any more."""

    def __init__(self, ssh: Ssh, folder: Path, handle: Handle) -> None:
        self._ssh, self._handle = ssh, handle
        self._place = folder_on_nodes(handle.extra.get("copied_to", ""), folder)
        self._next = 0.0
        self._found: set[Path] = set()

    def lost(self, attempt: Path, reported: Mapping[Path, NodeReport]) -> set[Path]:
        """Return the directories of the nodes that have reported no end, if the agents of all of these are gone.

        An agent that is there while others have ended ends soon, and one that these report as lost is gone. All others
        are probed by ssh; one whose machine cannot be reached is gone if its last heartbeat is old as well.

        Args:
            attempt: directory of the newest attempt.
            reported: what each node's agent has reported.
        """
        nodes = {attempt / f"node-{node['node']:03}": node for node in self._handle.extra.get("nodes", ())}
        open_ = {folder for folder in nodes if folder not in reported or not reported[folder].status.state.is_final}
        gone = agents.lost_folders(reported)
        if self._found >= open_ or open_ <= gone:
            return open_
        queried = open_ - gone
        has_none_ended = {*nodes} - open_ <= gone
        is_early = time.monotonic() < self._next
        if is_early or (has_none_ended and not self._are_quiet(queried, agents.HEARTBEAT_IS_OLD)):
            return set()
        answers = self._ssh.query([nodes[folder] for folder in queried], self._place, "0", _POLL_SECONDS)
        self._next = time.monotonic() + _QUERY_SECONDS
        # Read now: ssh may have tried for 10 s. Others that have lost a node could not reach it either.
        is_lost = any(each.ended_by_loss for each in reported.values())
        are_quiet = self._are_quiet(queried, _LOST_SECONDS if is_lost else agents.HEARTBEAT_IS_OLD)
        if all(are_quiet if answer.unreached else answer.code for answer in answers):
            # Read again after the processes: one may have reported its end between the two; the next call hears.
            self._found = {folder for folder in open_ if not agents.reported_by(folder).state.is_final}
        return self._found if self._found == open_ else set()

    def _are_quiet(self, folders: set[Path], seconds: float) -> bool:
        """Return whether no agent of these nodes has shown in this time that it is alive, or was started."""
        began = time.time() - float(self._handle.extra.get("began", 0))
        ages = (agents.heartbeat_age(folder) for folder in folders)
        return all((began if age is None else age) > seconds for age in ages)


class Lease:
    """Ties the agents on other machines to this process: a command on each ends the run when this process is silent.

    ``commands`` of ssh run ``end.sh`` with ``HELD``.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environ: Mapping[str, str]) -> None:
        kept = multiplexing.options(environ)
        self._over = threading.Event()
        self._held = [
            subprocess.Popen(
                [command[0], *kept, *command[1:]],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal is ours to pass on.
            )
            for command in commands
        ]
        threading.Thread(target=self._beat, daemon=True).start()

    def release(self) -> None:
        """End the commands: the run has ended."""
        self._over.set()
        for process in self._held:
            process.terminate()
            process.wait()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            for process in self._held:
                assert process.stdin
                with contextlib.suppress(OSError):  # It has exited: the run's agent there has, or the connection broke.
                    process.stdin.write(b"\n")
                    process.stdin.flush()


class SshRun:
    """A run that was just started on several machines. Waiting for it is reading what its agents report."""

    def __init__(
        self, cluster: SshCluster, folder: Path, handle: Handle, news: list[str], *, is_plain: bool, lease: Lease | None
    ) -> None:
        self.handle, self.outlives = handle, lease is None
        self._cluster, self._folder, self._lease, self._is_plain = cluster, folder, lease, is_plain
        self._news = news
        self._happened = Happened(folder / contract.node_dir(newest_attempt(folder), 0))
        self._has_ended = False
        self._next = 0.0

    def wait(self, seconds: float) -> bool:
        """Wait so long, unless the run has ended; return whether it has."""
        if not self._has_ended:
            time.sleep(seconds)
        if not self._has_ended and time.monotonic() >= self._next:
            self._next = time.monotonic() + _READ_SECONDS
            status, reported = self._cluster.read_status(self._folder, self.handle)
            self._news += self._happened.news()
            self._has_ended = status.state.is_final
            if self._has_ended and self._lease:
                self._lease.release()
            elif not self._has_ended and self._is_plain and agents.has_one_failed(reported):
                # torch's own launchers do not hear of each other as agents do: the others are ended once.
                self._is_plain = False
                self.signal(signal.SIGTERM)
        return self._has_ended

    def signal(self, number: int) -> None:
        """Pass a signal on to all agents."""
        self._cluster.ssh.send(self.handle, self._folder, signal.Signals(number).name.removeprefix("SIG"))

    def news(self) -> Sequence[str]:
        """Return which machines do not take part, and what node 0's agent has reported."""
        news, self._news = self._news, []
        return news + (self._cluster.missing(self._folder, self.handle) if self._has_ended else [])

    @property
    def awaited(self) -> str:
        """What is waited for until ranks run."""
        return "" if self._has_ended else self._happened.awaited
