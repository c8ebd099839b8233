"""Machines that are reached over SSH: an agent on each, in a session of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters import agents
from allranks.clusters.agents import Told
from allranks.clusters.base import Look, Looked, Request, Said, Started
from allranks.clusters.ssh_agents import handle_on_record, on_nodes, tell
from allranks.clusters.ssh_attach import Attached
from allranks.clusters.ssh_fetch import Fetched
from allranks.clusters.ssh_lost import Lost
from allranks.clusters.ssh_reach import Reach, looked_at, telling
from allranks.clusters.ssh_run import SshRun
from allranks.clusters.ssh_script import HELD
from allranks.clusters.ssh_start import start_all
from allranks.errors import JobError, LaunchError
from allranks.plan import batch
from allranks.runs.record import newest_attempt
from allranks.runs.status import Handle, State, Status

if TYPE_CHECKING:
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run

#: What to do about a machine that was lost.
_WHEN_LOST = "allranks resume {run} goes on from the newest checkpoint, when the machine is back"


class SshCluster:
    """The kind ``ssh``."""

    name, without = "ssh", "leave it out: --exclude {}"
    #: How commands get to the machines.
    reach = Reach()

    def __init__(self) -> None:
        self._lost: dict[tuple[Path, object], Lost] = {}
        self._fetched: dict[tuple[Path, object], Fetched] = {}

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed on the machines.

        Raises:
            JobError: the job asks for what cannot be had there, or its hosts cannot be read.
            PreflightError: ranks, GPUs and backend do not fit each other.
        """
        from allranks.clusters.ssh_plan import make_plan  # Not for those who only read what became of a run.

        return make_plan(request)

    def shell_command(
        self, job: Job, words: Sequence[str], environ: Mapping[str, str], *, terminal: bool
    ) -> tuple[str, ...]:
        """Refuse: there is nothing to wait for.

        Raises:
            JobError: always.
        """
        raise JobError(f"cluster {job.cluster} has no queue that could give a shell", fix="ssh HOST")

    def again(self, plan: Plan, attempt: int) -> Plan:
        """Return the plan for another attempt of a run: the same but for the attempt that its nodes are told."""
        from allranks.clusters.ssh_plan import with_attempt

        return with_attempt(plan, attempt)

    def look(self, plan: Plan, look: Look, environ: Mapping[str, str]) -> Sequence[Looked]:
        """Look at all machines."""
        answers = self.reach.look([node.host for node in plan.commands], look, environ)
        return [looked_at(node.host, answer) for node, answer in zip(plan.commands, answers, strict=True)]

    def outlook(self, plan: Plan, environ: Mapping[str, str]) -> None:
        """Return None: there is no scheduler."""

    def start(self, plan: Plan, environ: Mapping[str, str], *, detach: bool, interrupted: Callable[[], int]) -> Started:
        """Start the agents of all nodes at the same time; they go on without this process, detached or not.

        Raises:
            LaunchError: the first one, or too many, cannot be started. Those of the other nodes are ended then.
            StartCancelledError: a signal came before; all are ended.
        """
        begun = start_all(self.reach, plan, environ, interrupted)
        folder, handle = Path(plan.run_dir), begun.handle
        attached = None
        if plan.is_attached and not detach:
            attached = Attached(telling(handle.extra["nodes"], on_nodes(handle, folder), HELD), environ)
        is_plain = batch.SPEC_FILE not in {file.path for file in plan.files}
        return SshRun(self, folder, handle, begun.news, is_plain=is_plain, attached=attached)

    def status(self, run: Run) -> Status:
        """Find out what has become of a run."""
        return self.look_at(run.folder, handle_on_record(run))[0]

    def look_at(self, folder: Path, handle: Handle) -> tuple[Status, Mapping[Path, Told]]:
        """Find out what has become of the run in a folder, from what its agents told and whether they are there.

        Returns:
            Its status, and what each node's agent told in the newest attempt, by the node's folder.
        """
        fetched = self._fetched_of(folder, handle)
        if fetched:
            fetched.look()
        attempt = folder / contract.attempt_dir(newest_attempt(folder))
        started = {attempt / f"node-{node['node']:03}" for node in handle.extra.get("nodes", ())}
        told = {node: each for node, each in agents.told_by_each(attempt).items() if node in started or not started}
        status = self._status_of(folder, handle, attempt, told)
        if fetched and status.state.is_final:
            fetched.finish()
        return status, told

    def _status_of(self, folder: Path, handle: Handle, attempt: Path, told: Mapping[Path, Told]) -> Status:
        status = agents.combined([each.status for each in told.values()])
        if status.state.is_final:
            return agents.end_of(told)
        key = folder, handle.extra.get("began")
        lost = self._lost.setdefault(key, Lost(self.reach, folder, handle)).look(attempt, told)
        if not lost:
            return status
        known = {node: each for node, each in told.items() if node not in lost}
        if known and all(each.status.state.is_final for each in known.values()):
            return agents.end_of(known)
        reason = "the agents are gone without a word: they were killed, or their machines went down"
        return Status(State.FAILED, "agents gone", reason, 1, started=status.started, ended=time.time())

    def bring(self, run: Run) -> None:
        """Bring what the machines have written of a run, where they share no folder."""
        if fetched := self._fetched_of(run.folder, handle_on_record(run)):
            fetched.look()

    def missing(self, folder: Path, handle: Handle) -> list[str]:
        """Tell from which machines what a run has written could not be brought, and why, a line each."""
        fetched = self._fetched_of(folder, handle)
        failed = fetched.finish() if fetched else {}
        return [f"what {host} wrote last is not here: {said}" for host, said in failed.items()]

    def _fetched_of(self, folder: Path, handle: Handle) -> Fetched | None:
        extra = handle.extra
        if not extra.get("copied_to"):
            return None
        key = folder, extra.get("began")
        if key not in self._fetched:
            self._fetched[key] = Fetched(folder, extra["nodes"], extra["copied_to"], Path(extra["workdir"]))
        return self._fetched[key]

    def cancel(self, run: Run) -> None:
        """End a run and wait until nothing of it is left on any machine.

        Raises:
            LaunchError: a machine cannot be reached.
        """
        unreached = tell(self.reach, handle_on_record(run), run.folder, "END", run.record.stop_timeout)
        if unreached:
            host, said = next(iter(unreached.items()))
            raise LaunchError(
                f"{', '.join(unreached)} cannot be reached; on the other machines nothing of {run.record.id} is left",
                why=f"{host}: {said}",
                fix="an agent that is cut off from the others ends by itself; allranks cancel again to make sure",
            )

    def said(self, run: Run) -> Said:
        """Find what an agent said at last, of the first node whose agent said anything."""
        told = agents.told_by_each(run.attempt_folder)
        said = next((said for said in map(agents.said, told) if said.causes), Said())
        is_lost = any(each.ended_by_loss for each in told.values())
        return replace(said, fix=_WHEN_LOST) if is_lost else said
