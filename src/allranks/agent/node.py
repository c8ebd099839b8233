"""One node's part of an attempt: ranks run, events are told, and a signal or a lost launcher ends it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.agent.ranks import Ranks, StarterGoneError
from allranks.agent.stop import Stop
from allranks.agent.telling import Heartbeat, complain
from allranks.contract import NodeSpec
from allranks.errors import AllranksError, LaunchError
from allranks.processes import marked, signal_process
from allranks.runs.events import EventWriter
from allranks.runs.logindex import LogIndexWriter

if TYPE_CHECKING:
    import socket

    from allranks.agent.elastic import WarmElasticAgent


@dataclass(frozen=True)
class Outcome:
    """How the node's part ended: SUCCEEDED, FAILED or CANCELLED, and the code to leave with."""

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
        began: when this process began, in seconds since 1970.
        stop: requests to end.
    """

    channel: socket.socket
    plain: str | None
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
    try:
        agent = _make_agent(node, start, ranks, events, index)
        return _run(agent, start.stop, events)
    except AllranksError as error:
        events.write(contract.ERROR, what=error.what, why=error.why, fix=error.fix, see=error.see)
        return Outcome("FAILED", error.exit_code, error.what)
    except StarterGoneError as error:
        _kill_all(node)
        return Outcome("FAILED", 1, f"{error}; its ranks were killed with it")
    except Exception as error:  # noqa: BLE001 - the ranks must be ended, and the record must say why
        complain()
        return Outcome("FAILED", 1, f"the agent failed: {type(error).__name__}: {error}")


def _make_agent(
    node: NodeSpec, start: Start, ranks: Ranks, events: EventWriter, index: LogIndexWriter
) -> WarmElasticAgent:
    # Imported here: in a job with plain ranks torch must not be loaded before the starter has been forked.
    try:
        from allranks.agent.elastic import WarmElasticAgent, describe
        from allranks.agent.rendezvous import OneNodeRendezvous
    except Exception as error:
        complain()
        raise _no_torch(error) from error
    events.write(
        contract.AGENT_STARTED,
        pid=os.getpid(),
        began=start.began,
        python=sys.executable,
        torch=sys.modules["torch"].__version__,
        plain=start.plain,
    )
    python = None if start.plain is None else (sys.executable, *node.python_options)
    rendezvous = OneNodeRendezvous(node.run_id, node.master_addr, node.master_port)
    return WarmElasticAgent(describe(node, rendezvous), node, _folder(node), ranks, python, events, index, start.stop)


def _run(agent: WarmElasticAgent, stop: Stop, events: EventWriter) -> Outcome:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    gc.freeze()
    gc.enable()
    stop.ready()
    try:
        result = agent.run()
    except SignalException as error:
        events.write(contract.STOP_REQUESTED, signal=error.sigval.name, by=str(error))
        if agent.first_failure is None:
            return Outcome("CANCELLED", 128 + error.sigval, str(error))
        # A rank had failed before, and the others were being ended for that.
        return _failed(agent)
    return _failed(agent) if result.is_failed() else Outcome("SUCCEEDED", 0)


def _failed(agent: WarmElasticAgent) -> Outcome:
    assert agent.first_failure is not None
    rank, ended = agent.first_failure
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


def _no_torch(error: Exception) -> LaunchError:
    return LaunchError(
        f"{sys.executable} cannot import torch",
        why=str(error),
        fix="install torch there, or name the environment that has it: environment.venv, .conda or .python",
    )
