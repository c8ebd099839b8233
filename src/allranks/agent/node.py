"""One node's part of an attempt: ranks run, events are told, and a signal or a lost launcher ends it."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from allranks import contract
from allranks.agent.ranks import Ranks, StarterGoneError
from allranks.contract import NodeSpec
from allranks.errors import AllranksError, LaunchError
from allranks.runs.events import EventWriter
from allranks.runs.logindex import LogIndexWriter

if TYPE_CHECKING:
    import socket

    from allranks.agent.elastic import WarmElasticAgent

_HEARTBEAT_SECONDS = 5.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Outcome:
    """How the node's part ended: SUCCEEDED, FAILED or CANCELLED, and the code to leave with."""

    state: str
    exit_code: int
    reason: str | None = None
    rank: int | None = None


class Heartbeat:
    """A file that changes every few seconds while the agent is alive; also keeps the log index up to date."""

    def __init__(self, path: Path, index: LogIndexWriter, mode: int) -> None:
        self._index = index
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
        self._next = 0.0

    def tick(self) -> None:
        """Note which logs have grown and, when it is time, beat."""
        self._index.tick()
        if (now := time.time()) >= self._next:
            self._next = now + _HEARTBEAT_SECONDS
            # Fixed width, in place: a reader sees this beat or the last one. No space is needed on the disk.
            os.pwrite(self._descriptor, f"{now:017.6f}\n".encode(), 0)


def run_node(node: NodeSpec, channel: socket.socket, plain: str | None, began: float) -> Outcome:
    """Run the node's ranks to their end.

    Args:
        node: the orders.
        channel: the socket to the starter.
        plain: why ranks start as plain interpreters, or None when they are forked.
        began: when this process began, in seconds since 1970.
    """
    folder = Path(node.run_dir, contract.node_dir(node.attempt, node.node))
    events = EventWriter(folder / contract.AGENT_EVENTS, node.file_mode)
    try:
        outcome = _drive(node, folder, channel, plain, began, events)
    except AllranksError as error:
        events.write(contract.ERROR, what=error.what, why=error.why, fix=error.fix, see=error.see)
        outcome = Outcome("FAILED", error.exit_code, error.what)
    except StarterGoneError as error:
        outcome = Outcome("FAILED", 1, f"{error}; its ranks were killed with it")
    events.write(
        contract.ENDED,
        state=outcome.state,
        exit_code=outcome.exit_code,
        reason=outcome.reason,
        because_of_rank=outcome.rank,
    )
    return outcome


def _drive(
    node: NodeSpec, folder: Path, channel: socket.socket, plain: str | None, began: float, events: EventWriter
) -> Outcome:
    index = LogIndexWriter(folder, node.file_mode)
    heart = Heartbeat(folder / contract.HEARTBEAT, index, node.file_mode)
    lifeline = 0 if os.environ.get(contract.LIFELINE) else None
    ranks = Ranks(channel, heart.tick, lifeline, _launcher_gone)
    heart.tick()
    try:
        agent = _make_agent(node, folder, ranks, plain, events, index)
        torch_version = sys.modules["torch"].__version__
        events.write(
            contract.AGENT_STARTED,
            pid=os.getpid(),
            began=began,
            python=sys.executable,
            torch=torch_version,
            plain=plain,
        )
        outcome = _run(agent, events)
    except ImportError as error:
        traceback.print_exc()
        ranks.quit(clean=True)
        raise _no_torch(error) from error
    ranks.quit(clean=outcome.state == "SUCCEEDED")
    index.close()
    return outcome


def _make_agent(
    node: NodeSpec, folder: Path, ranks: Ranks, plain: str | None, events: EventWriter, index: LogIndexWriter
) -> WarmElasticAgent:
    # Imported here: in a job with plain ranks torch must not be loaded before the starter has been forked.
    from allranks.agent.elastic import WarmElasticAgent, describe
    from allranks.agent.rendezvous import OneNodeRendezvous

    python = None if plain is None else (sys.executable, *node.python_options)
    rendezvous = OneNodeRendezvous(node.run_id, node.master_addr, node.master_port)
    return WarmElasticAgent(describe(node, rendezvous), node, folder, ranks, python, events, index)


def _run(agent: WarmElasticAgent, events: EventWriter) -> Outcome:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def stop(number: int, _: FrameType | None) -> None:
        if agent.stopping:
            agent.hurry = True
            return
        agent.stopping = True
        raise SignalException(f"got {signal.Signals(number).name}", signal.Signals(number))

    for number in _STOP_SIGNALS:
        signal.signal(number, stop)
    try:
        result = agent.run()
    except SignalException as error:
        events.write(contract.STOP_REQUESTED, signal=error.sigval.name, by=str(error))
        return Outcome("CANCELLED", 128 + error.sigval, str(error))
    if not result.is_failed():
        return Outcome("SUCCEEDED", 0)
    assert agent.first_failure is not None
    rank, ended = agent.first_failure
    code = ended.code if ended.code > 0 else 128 - ended.code
    return Outcome("FAILED", code, describe_exit(rank, ended.code), rank)


def describe_exit(rank: int, code: int) -> str:
    """Say in words how a rank ended."""
    if code >= 0:
        return f"rank {rank} ended with exit code {code}"
    return f"rank {rank} was killed by {signal.Signals(-code).name}"


def _launcher_gone() -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    raise SignalException("the launcher is gone", signal.SIGTERM)


def _no_torch(error: ImportError) -> LaunchError:
    return LaunchError(
        f"{sys.executable} cannot import torch",
        why=str(error),
        fix="install torch there, or name the environment that has it: environment.venv, .conda or .python",
    )
