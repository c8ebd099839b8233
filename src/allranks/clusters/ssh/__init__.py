"""Machines that are reached over SSH: an agent on each, in a session of its own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.base import ClusterKind, Probe, ProbeResult, Request, Started
from allranks.clusters.ssh.liveness import Lease, Liveness, SshRun
from allranks.clusters.ssh.start import start_all
from allranks.clusters.ssh.sync import Fetcher
from allranks.clusters.ssh.transport import HELD, Ssh, end_commands, fix_for, folder_on_nodes
from allranks.errors import LaunchError
from allranks.runs import agents
from allranks.runs.agents import NodeReport
from allranks.runs.record import newest_attempt
from allranks.runs.status import Handle, LogExcerpt, State, Status

if TYPE_CHECKING:
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run

#: What to do about a machine that was lost.
_WHEN_LOST = "allranks resume {run} continues from the newest checkpoint, when the machine is back"


class SshCluster(ClusterKind):
    """The kind ``ssh``."""

    name, without = "ssh", "leave it out: --exclude {}"
    #: How commands get to the machines.
    ssh = Ssh()

    def __init__(self) -> None:
        self._runs: dict[tuple[Path, object], tuple[Liveness, Fetcher]] = {}

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
        is_plain = contract.NODE_ORDERS not in {file.path for file in plan.files}
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

    def _of(self, folder: Path, handle: Handle) -> tuple[Liveness, Fetcher]:
        key = folder, handle.extra.get("began")
        if key not in self._runs:
            self._runs[key] = Liveness(self.ssh, folder, handle), Fetcher(folder, handle)
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
        said = next((said for said in map(agents.log_excerpt, reported) if said.causes), LogExcerpt())
        return replace(said, fix=_WHEN_LOST) if any(each.ended_by_loss for each in reported.values()) else said


def _status(liveness: Liveness, attempt: Path, reported: Mapping[Path, NodeReport]) -> Status:
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
