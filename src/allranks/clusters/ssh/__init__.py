"""Machines that are reached over SSH: an agent on each, in a session of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.base import ClusterKind, Probe, ProbeResult, Request, Started
from allranks.clusters.ssh.start import start_all
from allranks.clusters.ssh.sync import Fetcher
from allranks.clusters.ssh.transport import HELD, Ssh, end_commands, fix_for, folder_on_nodes, kept_options
from allranks.errors import LaunchError
from allranks.logs.cause import LogExcerpt
from allranks.runs import agents
from allranks.runs.agents import Happened, NodeReport
from allranks.runs.excerpts import agent_excerpt
from allranks.runs.record import newest_attempt
from allranks.runs.status import Handle, State, Status

if TYPE_CHECKING:
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run

#: What to do about a machine that was lost.
_WHEN_LOST = "allranks resume {run} continues from the newest checkpoint, when the machine is back"
#: How long a machine may take to report whether an agent is there, and how often silent agents are probed.
_POLL_SECONDS, _QUERY_SECONDS = 20.0, 5.0
#: The age of two heartbeats: a machine that neither the others nor this one reaches is not waited for any longer.
_LOST_SECONDS = contract.scaled_wait(10.0)
#: How often what the agents report is read: on a shared filesystem each read costs.
_READ_SECONDS = 0.3
#: How often this process signals each machine that it is alive; ``end.sh`` has the patience of a machine.
_BEAT_SECONDS = contract.scaled_wait(5.0)


class SshCluster(ClusterKind):
    """The kind ``ssh``."""

    name, without = "ssh", "leave it out: --exclude {}"
    #: How commands get to the machines.
    ssh = Ssh()

    def __init__(self) -> None:
        self._runs: dict[tuple[Path, object], tuple[_Liveness, Fetcher]] = {}

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed on the machines."""
        from allranks.clusters.ssh.plan import SshPlanning  # Reading a run's status needs none of it.

        return SshPlanning(request).plan()

    def again(self, plan: Plan, attempt: int) -> Plan:
        """Return the plan for another attempt of a run: the same but for the last word of its nodes' commands."""
        commands = tuple(
            replace(node, command=(*node.command[:-1], f"{node.command[-1].rpartition(' ')[0]} {attempt}"))
            for node in plan.commands
        )
        return replace(plan, attempt=attempt, commands=commands)

    def probe(self, plan: Plan, probe: Probe, environ: Mapping[str, str]) -> Sequence[ProbeResult]:
        """Probe all machines; where one was not reached, with what its user can do."""
        hosts = [node.host for node in plan.commands]
        return [
            ProbeResult(host, answer, fix_for(host, answer.err) if answer.unreached else "")
            for host, answer in zip(hosts, self.ssh.probe(hosts, probe, environ), strict=True)
        ]

    def start(self, plan: Plan, environ: Mapping[str, str], *, detach: bool, interrupted: Callable[[], int]) -> Started:
        """Start the agents of all nodes at the same time; they continue without this process, detached or not."""
        handle, news = start_all(self.ssh, plan, environ, interrupted)
        folder, lease = Path(plan.run_dir), None
        if plan.is_attached and not detach:
            lease = Lease(end_commands(handle.extra["nodes"], folder_on_nodes(plan.copied_to, folder), HELD), environ)
        is_plain = contract.NODE_SPEC not in {file.path for file in plan.files}
        return SshRun(self, folder, handle, news, is_plain=is_plain, lease=lease)

    def status(self, run: Run) -> Status:
        """Return the status of a run as it is now."""
        return self.read_status(run.folder, _handle_of(run))[0]

    def read_status(self, folder: Path, handle: Handle) -> tuple[Status, Mapping[Path, NodeReport]]:
        """Find the status of the run in a directory, from what its agents reported and whether they are there.

        Returns:
            Its status, and what each node's agent reported in the newest attempt, by the node's directory.
        """
        liveness, fetcher = self._of(folder, handle)
        fetcher.fetch()
        attempt = folder / contract.attempt_dir(newest_attempt(folder))
        started = {attempt / f"node-{node['node']:03}" for node in handle.extra.get("nodes", ())}
        reports = agents.reported_by_each(attempt)
        reported = {node: report for node, report in reports.items() if node in started or not started}
        status = _status(liveness, attempt, reported)
        if status.state.is_final:
            fetcher.finish()
        return status, reported

    def fetch(self, run: Run) -> None:
        """Fetch what the machines have written of a run, where they do not share its directory."""
        self._of(run.folder, _handle_of(run))[1].fetch()

    def missing(self, folder: Path, handle: Handle) -> list[str]:
        """Return from which machines what a run has written could not be fetched, and why, a line each."""
        failed = self._of(folder, handle)[1].finish()
        return [f"what {host} wrote last is not here: {said}" for host, said in failed.items()]

    def _of(self, folder: Path, handle: Handle) -> tuple[_Liveness, Fetcher]:
        key = folder, handle.extra.get("began")
        if key not in self._runs:
            self._runs[key] = _Liveness(self.ssh, folder, handle), Fetcher(folder, handle)
        return self._runs[key]

    def cancel(self, run: Run) -> None:
        """End a run and wait until nothing of it is left on any machine."""
        unreached = self.ssh.send(_handle_of(run), run.folder, "END", run.record.stop_timeout)
        if unreached:
            host, said = next(iter(unreached.items()))
            raise LaunchError(
                f"{', '.join(unreached)} cannot be reached; on the other machines nothing of {run.record.id} is left",
                why=f"{host}: {said}",
                fix="an agent that is cut off from the others ends by itself; allranks cancel again to make sure",
            )

    def log_excerpt(self, run: Run) -> LogExcerpt:
        """Find what an agent's log ends with, on the first node that has a cause."""
        reported = agents.reported_by_each(run.attempt_folder)
        said = next((said for said in map(agent_excerpt, reported) if said.causes), LogExcerpt())
        return said._replace(fix=_WHEN_LOST) if any(each.ended_by_loss for each in reported.values()) else said


def _status(liveness: _Liveness, attempt: Path, reported: Mapping[Path, NodeReport]) -> Status:
    status = agents.combined([each.status for each in reported.values()])
    if status.state.is_final:
        return agents.end_of(reported)
    lost = liveness.lost(attempt, reported)
    if not lost:
        return status
    known = {node: each for node, each in reported.items() if node not in lost}
    if known and all(each.status.state.is_final for each in known.values()):
        return agents.end_of(known)
    reason = "the agents are gone without a word: they were killed, or their machines went down"
    return Status(State.FAILED, "agents gone", reason, 1, started=status.started, ended=time.time())


def _handle_of(run: Run) -> Handle:
    """Return the handle on record or, where a launcher ended before it could write one, what the plan says."""
    if not run.record.handle.extra.get("nodes"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            plan = json.loads((run.folder / contract.PLAN_FILE).read_text(encoding="utf-8"))
            nodes = [{"node": node["node"], "host": node["host"], "pid": 0, "started": 0} for node in plan["commands"]]
            folders = {name: plan[name] for name in ("copied_to", "workdir")}
            return Handle(host=run.record.host, extra={"nodes": nodes, "began": run.record.created, **folders})
    return run.record.handle


class _Liveness:
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
        kept = kept_options(environ)
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
