"""Machines that are reached over SSH, and see the run's folder: an agent on each, in a session of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.clusters import agents
from allranks.clusters.base import Request, Said, Started
from allranks.clusters.ssh_script import END, ENDED_AT_ONCE, NO_FOLDER
from allranks.clusters.ssh_shell import Answer, fix_for, run_all, ssh_command
from allranks.errors import JobError, LaunchError
from allranks.job.hosts import parse_hosts
from allranks.runs.record import newest_attempt
from allranks.runs.status import Handle, State, Status

if TYPE_CHECKING:
    from allranks.job.spec import Job
    from allranks.plan.plan import NodeCommand, Plan
    from allranks.runs.record import Run

#: What an agent may take to begin: a setup of its own, and importing torch from a slow disk.
_BEGIN_SECONDS = 300.0
#: What a machine may take beyond the ranks' own time to end a run, and to answer.
_END_SECONDS = 60.0
_LOOK_SECONDS = 20.0
#: How often what the agents tell is read: on a shared filesystem each look costs.
_READ_SECONDS = 0.3
#: How often agents that say nothing are looked for.
_ASK_SECONDS = 5.0
#: What a machine tells of its agent, after whatever else a login there may print.
_TOLD = re.compile(r"^(\d+) (\d+)$", re.MULTILINE)
#: The exit code of bash for a script that is not there.
_NOT_FOUND = 127


class SshCluster:
    """The kind ``ssh``."""

    name = "ssh"

    def __init__(self) -> None:
        self._lost: dict[tuple[Path, object], _Lost] = {}

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

    def start(self, plan: Plan, environ: Mapping[str, str], *, detach: bool) -> Started:
        """Start the agents of all nodes at the same time; they go on without this process, detached or not.

        Raises:
            LaunchError: one cannot be started. Those of the other nodes are ended then.
        """
        secrets = "".join(f"export {name}={shlex.quote(environ[name])}\n" for name in plan.secrets)
        answers = run_all([node.command for node in plan.commands], environ, sent=secrets, seconds=_BEGIN_SECONDS)
        pairs = [*zip(plan.commands, answers, strict=True)]
        nodes = [_agent(node, answer) for node, answer in pairs if not answer.code or answer.is_late]
        handle = Handle(host=socket.gethostname(), extra={"nodes": nodes, "began": time.time()})
        if failed := [(node, answer) for node, answer in pairs if answer.code]:
            _tell(handle, Path(plan.run_dir), "END", plan.stop_timeout)
            raise _cannot_start(plan, failed)
        return SshRun(self, Path(plan.run_dir), handle)

    def status(self, run: Run) -> Status:
        """Find out what has become of a run."""
        return self.status_of(run.folder, _handle(run))

    def status_of(self, folder: Path, handle: Handle) -> Status:
        """Find out what has become of the run in a folder, from what its agents told and whether they are there."""
        attempt = folder / contract.attempt_dir(newest_attempt(folder))
        told = agents.told_by_each(attempt)
        status = agents.combined(told.values())
        if status.state.is_final:
            return status
        key = folder, handle.extra.get("began")
        lost = self._lost.setdefault(key, _Lost(folder, handle)).look(attempt, told)
        if not lost:
            return status
        known = agents.combined([each for node, each in told.items() if node not in lost])
        if known.state.is_final:
            return known
        reason = "the agents are gone without a word: they were killed, or their machines went down"
        return Status(State.FAILED, "agents gone", reason, 1, started=status.started, ended=time.time())

    def cancel(self, run: Run) -> None:
        """End a run and wait until nothing of it is left on any machine.

        Raises:
            LaunchError: a machine cannot be reached.
        """
        unreached = _tell(_handle(run), run.folder, "END", run.record.stop_timeout)
        if unreached:
            host, said = next(iter(unreached.items()))
            raise LaunchError(
                f"{', '.join(unreached)} cannot be reached; on the other machines nothing of {run.record.id} is left",
                why=f"{host}: {said}",
                fix="an agent that is cut off from the others ends by itself; allranks cancel again to make sure",
            )

    def said(self, run: Run) -> Said:
        """Find what an agent said at last, of the first node whose agent said anything."""
        found = (agents.said(folder) for folder in sorted(run.attempt_folder.glob("node-*")))
        return next((said for said in found if said.causes), Said())


class SshRun:
    """A run that was just started on several machines. Waiting for it is reading what its agents tell."""

    outlives = True

    def __init__(self, cluster: SshCluster, folder: Path, handle: Handle) -> None:
        self.handle = handle
        self._cluster, self._folder = cluster, folder
        self._has_ended = False
        self._next = 0.0

    def wait(self, seconds: float) -> bool:
        """Wait so long, unless the run has ended; tell whether it has."""
        if not self._has_ended:
            time.sleep(seconds)
        if not self._has_ended and time.monotonic() >= self._next:
            self._next = time.monotonic() + _READ_SECONDS
            self._has_ended = self._cluster.status_of(self._folder, self.handle).state.is_final
        return self._has_ended

    def signal(self, number: int) -> None:
        """Pass a signal on to all agents."""
        _tell(self.handle, self._folder, signal.Signals(number).name.removeprefix("SIG"))

    def news(self) -> Sequence[str]:
        """Tell nothing: what happens shows in the ranks' own lines."""
        return ()


class _Lost:
    """Looks now and then for agents that say nothing any more."""

    def __init__(self, folder: Path, handle: Handle) -> None:
        self._folder, self._handle = folder, handle
        self._next = 0.0
        self._found: set[Path] = set()

    def look(self, attempt: Path, told: Mapping[Path, Status]) -> set[Path]:
        """Return the folders of the nodes that have told no end, if the agents of all of these are gone.

        Agents hear of each other's end: one that is there while others have ended ends soon, and one that these say
        was lost is gone for them. All others are asked for by ssh; one whose machine cannot be reached is gone when
        its last heartbeat is old as well.

        Args:
            attempt: folder of the newest attempt.
            told: what each node's agent told of.
        """
        nodes = {attempt / f"node-{node['node']:03}": node for node in self._handle.extra.get("nodes", ())}
        open_ = {folder for folder in nodes if folder not in told or not told[folder].state.is_final}
        if self._found >= open_:
            return open_
        if time.monotonic() < self._next:
            return set()
        asked = open_ - {attempt / f"node-{node:03}" for node in agents.told_lost(attempt)}
        is_quiet = all(self._age(folder) > agents.HEARTBEAT_IS_OLD for folder in asked)
        if len(open_) == len(nodes) and not is_quiet:
            return set()
        commands = _commands([nodes[folder] for folder in asked], self._folder, "0")
        answers = run_all(commands, os.environ, seconds=_LOOK_SECONDS)
        self._next = time.monotonic() + _ASK_SECONDS
        if all(is_quiet if answer.unreached else answer.code for answer in answers):
            # Looked at again after the processes: one may have told its end between the two looks; the next call hears.
            self._found = {folder for folder in open_ if not agents.told_by(folder).state.is_final}
        return self._found if self._found == open_ else set()

    def _age(self, folder: Path) -> float:
        """Return the seconds since a node's agent showed that it is alive, or was started."""
        age = agents.heartbeat_age(folder)
        return time.time() - float(self._handle.extra.get("began", 0)) if age is None else age


def _handle(run: Run) -> Handle:
    """Return the handle on record or, where a launcher ended before it could write one, what the plan says."""
    if run.record.handle.extra.get("nodes"):
        return run.record.handle
    with contextlib.suppress(OSError, ValueError, KeyError):
        plan = json.loads((run.folder / contract.PLAN_FILE).read_text(encoding="utf-8"))
        nodes = [{"node": node["node"], "host": node["host"], "pid": 0, "started": 0} for node in plan["commands"]]
        return Handle(host=run.record.host, extra={"nodes": nodes, "began": run.record.created})
    return run.record.handle


def _agent(node: NodeCommand, answer: Answer) -> dict[str, Any]:
    """Return what identifies the agent that a machine told of; 0 where it has told nothing."""
    told = _TOLD.search(answer.out)
    pid, started = (int(told[1]), int(told[2])) if told else (0, 0)
    return {"node": node.node, "host": node.host, "pid": pid, "started": started}


def _commands(nodes: Iterable[Mapping[str, Any]], folder: Path, what: str) -> list[tuple[str, ...]]:
    """Return the commands that tell agents something, or end them."""
    hosts = [(node, parse_hosts([node["host"]])[0]) for node in nodes]
    words = ("bash", str(folder / END), what)
    return [ssh_command(host, (*words, str(node["pid"]), str(node["started"]))) for node, host in hosts]


def _tell(handle: Handle, folder: Path, what: str, patience: float = 0.0) -> dict[str, str]:
    """Tell all agents of a run something; return the hosts that cannot be reached, and what ssh says."""
    nodes = handle.extra.get("nodes", ())
    answers = run_all(_commands(nodes, folder, what), os.environ, seconds=patience + _END_SECONDS)
    pairs = zip(nodes, answers, strict=True)
    return {node["host"]: answer.last_words for node, answer in pairs if answer.unreached}


def _cannot_start(plan: Plan, failed: Sequence[tuple[NodeCommand, Answer]]) -> LaunchError:
    (node, answer), *others = failed
    host, more = node.host, f" (and {', '.join(other.host for other, _ in others)})" if others else ""
    log = str(Path(plan.run_dir, contract.node_dir(plan.attempt, node.node), contract.AGENT_LOG))
    if answer.unreached:
        return LaunchError(
            f"cannot reach {host}{more}", why=answer.last_words, fix=fix_for(parse_hosts([host])[0], answer.err)
        )
    if answer.code in (NO_FOLDER, _NOT_FOUND):
        return LaunchError(
            f"{host}{more} does not see the run's folder",
            why=answer.last_words,
            fix="runs.folder, and where the job is, must be on a filesystem that all machines share",
        )
    if answer.code == ENDED_AT_ONCE:
        return LaunchError(f"the agent on {host}{more} ended before it began", why=answer.last_words, see=log)
    return LaunchError(f"the agent on {host}{more} cannot be started", why=answer.last_words)
