"""One node's part of an attempt: ranks run, events are told, and a signal or a lost launcher ends it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from allranks import contract
from allranks.agent.group import RankGroup
from allranks.agent.listener import listen
from allranks.agent.ranks import RankExit, Ranks, StarterGoneError
from allranks.agent.stop import Stop, StopRequestedError
from allranks.agent.telling import Heartbeat, complain
from allranks.agent.torch_import import TorchImport
from allranks.agent.torchless import run_without_torch
from allranks.contract import NodeSpec
from allranks.errors import AllranksError
from allranks.processes import marked, signal_process
from allranks.runs.events import EventWriter
from allranks.runs.logindex import LogIndexWriter


@dataclass(frozen=True)
class Outcome:
    """How the node's part ended: SUCCEEDED, FAILED, CANCELLED or PREEMPTED, and the code to leave with."""

    state: str
    exit_code: int
    reason: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Start:
    """How this agent started.

    Attributes:
        channel: the socket to the starter.
        plain: why ranks start as plain interpreters, or None when they are forked.
        needs_torch: whether the ranks can be expected to need torch.
        began: when this process began, in seconds since 1970.
        stop: requests to end.
    """

    channel: socket.socket
    plain: str | None
    needs_torch: bool
    began: float
    stop: Stop


def run_node(node: NodeSpec, start: Start) -> Outcome:
    """Run the node's ranks to their end, tell how it went, and leave no process behind."""
    os.umask(0o666 & ~node.file_mode)  # For the agent's own files: the starter, and so the ranks, have the user's.
    folder = _folder(node)
    events = EventWriter(folder / contract.AGENT_EVENTS, node.file_mode)
    index = LogIndexWriter(folder, node.file_mode)
    heart = Heartbeat(folder / contract.HEARTBEAT, index, node.file_mode)
    heart.tick()
    ranks = Ranks(start.channel, heart.tick, start.stop.check)
    outcome = _drive(node, start, ranks, events, index)
    ranks.quit(clean=outcome.state == "SUCCEEDED")
    index.close()
    _tell_end(events, outcome)
    return outcome


def leave_early(node: NodeSpec, stop: Stop) -> None:
    """End at once, before there is any rank, and tell why."""
    assert stop.signal is not None
    events = EventWriter(_folder(node) / contract.AGENT_EVENTS, node.file_mode)
    events.write(contract.STOP_REQUESTED, signal=stop.signal.name, by=stop.why)
    _tell_end(events, Outcome("CANCELLED", 128 + stop.signal, stop.why))
    os._exit(128 + stop.signal)


def _folder(node: NodeSpec) -> Path:
    return Path(node.run_dir, contract.node_dir(node.attempt, node.node))


def _tell_end(events: EventWriter, outcome: Outcome) -> None:
    events.write(
        contract.ENDED,
        state=outcome.state,
        exit_code=outcome.exit_code,
        reason=outcome.reason,
        because_of_rank=outcome.rank,
    )


def _drive(node: NodeSpec, start: Start, ranks: Ranks, events: EventWriter, index: LogIndexWriter) -> Outcome:
    """Run the ranks; whatever goes wrong becomes an outcome."""
    python = None if start.plain is None else (sys.executable, *node.python_options)
    group = RankGroup(node, _folder(node), ranks, python, events, index, start.stop)
    try:
        return _outcome(node, start, group, events)
    except AllranksError as error:
        events.write(contract.ERROR, what=error.what, why=error.why, fix=error.fix, see=error.see)
        return Outcome("FAILED", error.exit_code, error.what)
    except StarterGoneError as error:
        _kill_all(node)
        return Outcome("FAILED", 1, f"{error}; its ranks were killed with it")
    except Exception as error:  # noqa: BLE001 - the ranks must be ended, and the record must say why
        complain()
        return Outcome("FAILED", 1, f"the agent failed: {type(error).__name__}: {error}")


def _outcome(node: NodeSpec, start: Start, group: RankGroup, events: EventWriter) -> Outcome:
    try:
        _see_to_the_end(node, start, group, events)
    except StopRequestedError as error:
        number = start.stop.signal or signal.SIGTERM
        events.write(contract.STOP_REQUESTED, signal=number.name, by=str(error))
        if group.first_failure is None:
            return Outcome("CANCELLED", 128 + number, str(error))
        # A rank had failed before, and the others were being ended for that.
    if group.first_failure:
        return _failed(*group.first_failure)
    if group.wants_to_continue:
        return Outcome("PREEMPTED", contract.CONTINUE_LATER, "asked to stop, the ranks have saved and left")
    return Outcome("SUCCEEDED", 0)


def _see_to_the_end(node: NodeSpec, start: Start, group: RankGroup, events: EventWriter) -> None:
    """Run the ranks, with all their restarts; none is left when this returns or raises."""
    torch = TorchImport()
    if start.needs_torch:
        torch.finish()
    _tell_start(start, events)
    start.stop.ready()
    try:
        if start.needs_torch:
            _run_elastic(node, group, events, None)
            return
        listener = listen(node.master_addr, node.master_port)
        if not run_without_torch(node, group, listener, torch):
            torch.finish()
            _run_elastic(node, group, events, listener)
    except BaseException:
        group.give_up()
        raise


def _tell_start(start: Start, events: EventWriter) -> None:
    events.write(
        contract.AGENT_STARTED,
        pid=os.getpid(),
        began=start.began,
        python=sys.executable,
        torch=sys.modules["torch"].__version__ if start.needs_torch else None,
        plain=start.plain,
    )


def _run_elastic(node: NodeSpec, group: RankGroup, events: EventWriter, listener: socket.socket | None) -> None:
    # Imported here: in a job with plain ranks torch must not be loaded before the starter has been forked.
    from allranks.agent.elastic import WarmElasticAgent, describe
    from allranks.agent.rendezvous import OneNodeRendezvous

    rendezvous = OneNodeRendezvous(node.run_id, node.master_addr, node.master_port, listener)
    WarmElasticAgent(describe(node, rendezvous), node, group, events).run()


def _failed(rank: int, ended: RankExit) -> Outcome:
    code = ended.code if ended.code > 0 else 128 - ended.code
    return Outcome("FAILED", code, describe_exit(rank, ended.code), rank)


def describe_exit(rank: int, code: int) -> str:
    """Say in words how a rank ended."""
    if code >= 0:
        return f"rank {rank} ended with exit code {code}"
    try:
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    except ValueError:  # Most real-time signals have no name.
        return f"rank {rank} was killed by signal {-code}"


def _kill_all(node: NodeSpec) -> None:
    """Kill what the ranks had started: without the starter nobody else knows of it."""
    for pid in marked(contract.RUN_DIR, node.run_dir):
        signal_process(pid, signal.SIGKILL)
