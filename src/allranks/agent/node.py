"""One node's part of an attempt: runs the ranks, records events, and stops on a signal or when the launcher dies."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from allranks import contract
from allranks.agent.hangs import HangJudge, HangWatch
from allranks.agent.heartbeat import Heartbeat, complain
from allranks.agent.stop import StopRequest, StopRequestedError
from allranks.agent.stores import Stores
from allranks.agent.workers.fork_server import ForkClient, ForkServerGoneError
from allranks.agent.workers.group import PREEMPTED, Generation, Outcome, WorkerGroup, failed, succeeded
from allranks.errors import AllranksError
from allranks.record.events import EventWriter
from allranks.record.spec import NodeSpec
from allranks.system.processes import marked, signal_process, variable_of

if TYPE_CHECKING:
    from allranks.agent.network import NetworkSetting
    from allranks.record.notify import Notifier

_POLL_SECONDS = 0.05
#: Agent events that send a notification, and its name.
_NOTIFIED = {contract.AGENT_STARTED: "start", contract.RESTART: "requeue", contract.ENDED: "end"}


class _NotifyingWriter(EventWriter):
    """Writes an agent's events, and sends notifications of some.

    ``has_supervisor``: whether a supervisor notifies of the start and end of the attempt instead.
    """

    def __init__(self, path: Path, mode: int, notifier: Notifier, *, has_supervisor: bool) -> None:
        super().__init__(path, mode)
        self._notifier = notifier
        self._notified = {contract.RESTART: "requeue"} if has_supervisor else _NOTIFIED

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event and notify of it; at the last event, wait for the notifications and record failed ones."""
        super().write(kind, **fields)
        if event := self._notified.get(kind):
            facts: dict[str, Any] = {"state": fields.get("state", "RUNNING")}
            if kind == contract.ENDED:
                facts |= {name: fields[name] for name in ("exit_code", "reason")}
                event = "failure" if facts["state"] == "FAILED" else event
            elif kind == contract.RESTART:
                rank = fields["because_of_rank"]
                why = "a node was lost or came, or no rank advanced" if rank is None else f"rank {rank} failed"
                facts |= {"restart": fields["restart"], "reason": why}
            self._notifier.send(event, **facts)
        if kind == contract.ENDED:
            for name, problem in self._notifier.finish():
                super().write(contract.NOTIFY_FAILED, event=name, problem=problem)


def _event_writer(node: NodeSpec, path: Path, umask: int) -> EventWriter:
    """Return the writer of an agent's events; on the first node of a run with notifications, one that sends them.

    ``umask``: the user's, for the notification command.
    """
    run = Path(node.run_dir)
    if node.node or not (run / contract.NOTIFY_FILE).exists():
        return EventWriter(path, node.file_mode)
    from allranks.record.notify import Notifier  # Imported only for jobs with notifications: others start sooner.

    has_supervisor = (run / contract.BATCH_SPEC).exists()
    notifier = Notifier(run, node.attempt, umask=umask)
    return _NotifyingWriter(path, node.file_mode, notifier, has_supervisor=has_supervisor)


class Start(NamedTuple):
    """How this agent started."""

    channel: socket.socket  # to the fork server
    plain: str | None  # why ranks start as plain interpreters; None if they are forked
    needs_torch: bool
    began: float  # in seconds since 1970
    stop: StopRequest
    listener: socket.socket | None  # for the agents of other nodes; None except on node 0 of several
    settings: list[NetworkSetting]


class Agent:
    """The agent of a node. Create it after the fork server, which must not inherit the files that it opens."""

    def __init__(self, node: NodeSpec) -> None:
        # For the agent's own files; fork server, ranks and notification command keep the user's umask.
        umask = os.umask(0o666 & ~node.file_mode)
        self._node = node
        self._folder = Path(node.run_dir, contract.node_dir(node.attempt, node.node))
        self._folder.mkdir(node.folder_mode, parents=True, exist_ok=True)
        self._events = _event_writer(node, self._folder / contract.AGENT_EVENTS, umask)

    def stop_early(self, stop: StopRequest) -> NoReturn:
        """Exit because of a signal, before any rank was started."""
        assert stop.signal is not None
        self._events.write(contract.STOP_REQUESTED, signal=stop.signal.name, by=stop.why)
        self._record_end(Outcome("CANCELLED", 128 + stop.signal, stop.why))
        os._exit(128 + stop.signal)

    def fail_early(self, error: AllranksError) -> NoReturn:
        """Exit because of an error, before any rank was started."""
        self._record_end(self._failed(error))
        os._exit(error.exit_code)

    def run(self, start: Start) -> Outcome:
        """Run the node's ranks to their end, record the outcome, and leave no process behind."""
        heart = Heartbeat(self._folder, self._node.file_mode, is_alone=self._node.nnodes == 1)
        client = ForkClient(start.channel, lambda: heart.tick(client.pids.values), start.stop.check)
        hangs = HangWatch(self._node, self._folder, heart.index)
        heart.advanced = lambda: hangs.advanced
        group = WorkerGroup(self._node, self._folder, client, self._events, heart.index, start.stop, hangs)
        try:
            outcome = self._drive(start, client, group)
        except AllranksError as error:
            outcome = self._failed(error)
        except ForkServerGoneError as error:
            self._kill_all()
            outcome = Outcome("FAILED", 1, f"{error}; its ranks were killed with it")
        except Exception as error:  # noqa: BLE001 - the ranks must be ended, and the record must say why
            complain()
            outcome = Outcome("FAILED", 1, f"the agent failed: {type(error).__name__}: {error}")
        client.quit(clean=outcome.state == "SUCCEEDED")
        heart.index.close()
        self._record_end(outcome)
        return outcome

    def _drive(self, start: Start, client: ForkClient, group: WorkerGroup) -> Outcome:
        """Run the ranks through all restarts; none is left when this returns or raises."""
        stop, is_alone = start.stop, self._node.nnodes == 1
        stores = Stores(self._node.master_port if is_alone else None)
        if start.needs_torch:
            stores.import_torch()
        gc.enable()
        self._record_start(start)
        stop.ready()
        try:
            if is_alone:
                return self._run_one_node(stores, group, stop)
            from allranks.agent.nodes.client import run_many_nodes  # Single-node jobs start sooner without it.

            return run_many_nodes(self._node, start.listener, stores, stop, client, group, self._events)
        except StopRequestedError as error:
            number = stop.signal or signal.SIGTERM
            self._events.write(contract.STOP_REQUESTED, signal=number.name, by=str(error))
            if group.first_failure is None:
                return Outcome("CANCELLED", 128 + number, str(error))
            rank, ended = group.first_failure  # The other ranks were already being ended because of it.
            return failed(rank, ended.code)

    def _run_one_node(self, stores: Stores, group: WorkerGroup, stop: StopRequest) -> Outcome:
        """Run the ranks of a single-node job through all restarts."""
        node = self._node
        try:
            for restart in range(node.max_restarts + 1):
                port = stores.open(node.master_addr)
                group.start(Generation(restart, 0, 1, node.nproc_per_node, 0, node.master_addr, port))
                group.poll(0)  # Some may have exited while others were started.
                judge = HangJudge(node)
                while group.is_running and not group.first_failure and not self._must_end(judge, group):
                    stores.tick()
                    group.poll(_POLL_SECONDS)
                hangs = judge.hang is not None and group.first_failure is None and group.is_running
                if hangs and (judge.action == "end" or restart == node.max_restarts):
                    group.abort()
                    return Outcome("FAILED", 1, judge.why)
                if not hangs and (group.first_failure is None or restart == node.max_restarts):
                    break
                blamed = group.first_failure[0] if group.first_failure else None
                group.clear_failure()
                group.end()
                group.pause(restart + 1, blamed, counted=True)
            group.end()
        except BaseException:
            group.abort()
            raise
        if group.first_failure:
            rank, ended = group.first_failure
            return failed(rank, ended.code)
        leaving = group.left_to_continue
        if leaving is None:
            return succeeded(node, node.nproc_per_node, stores.was_used)
        was_requested = stop.signal is not None or stop.warned or bool(os.environ.get(contract.END_TIME))
        if was_requested or Path(node.run_dir, contract.CHECKPOINTS_FILE).exists():
            return PREEMPTED
        return failed(leaving, contract.CONTINUE_LATER)  # Nothing was saved: the code is the script's own.

    def _must_end(self, judge: HangJudge, group: WorkerGroup) -> bool:
        """Record the start or end of a hang; return whether the ranks must be ended because of it."""
        if found := judge.judge([group.hangs.quiet]):
            kind, fields = found
            self._events.write(kind, **fields)
        return judge.hang is not None and judge.action != "report"

    def _record_start(self, start: Start) -> None:
        self._events.write(
            contract.AGENT_STARTED,
            pid=os.getpid(),
            began=start.began,
            python=sys.executable,
            torch=sys.modules["torch"].__version__ if start.needs_torch else None,
            plain=start.plain,
        )
        if start.settings:
            self._events.write(contract.SETTINGS, settings=[setting._asdict() for setting in start.settings])
            complain("\n".join(map(str, start.settings)))

    def _failed(self, error: AllranksError) -> Outcome:
        complain(f"error: {error}")
        self._events.write(contract.ERROR, what=error.what, why=error.why, fix=error.fix, see=error.see)
        return Outcome("FAILED", error.exit_code, error.what)

    def _record_end(self, outcome: Outcome) -> None:
        self._events.write(
            contract.ENDED,
            state=outcome.state,
            exit_code=outcome.exit_code,
            reason=outcome.reason,
            because_of_rank=outcome.rank,
            lost=outcome.lost,
        )

    def _kill_all(self) -> None:
        """Kill the processes that ranks have started, which the fork server can no longer do."""
        here = os.environ.get(contract.NODE_RANK)  # On the first node, scheduler commands may carry the run's mark too.
        for pid in marked(contract.RUN_DIR, self._node.run_dir):
            if variable_of(pid, contract.NODE_RANK) == here:
                signal_process(pid, signal.SIGKILL)
