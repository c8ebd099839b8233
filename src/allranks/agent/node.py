"""One node's part of an attempt: ranks run, events are told, and a signal or a lost launcher ends it."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from allranks import contract
from allranks.agent.group import RankGroup
from allranks.agent.one_node import run_one_node
from allranks.agent.outcome import PREEMPTED, Outcome, failed, succeeded
from allranks.agent.ranks import Ranks, StarterGoneError
from allranks.agent.stop import Stop, StopRequestedError
from allranks.agent.telling import Heartbeat, complain
from allranks.agent.torch_import import TorchImport
from allranks.agent.usage import Usage
from allranks.contract import NodeSpec
from allranks.errors import AllranksError
from allranks.processes import marked, signal_process, told
from allranks.runs.events import EventWriter
from allranks.runs.logindex import LogIndexWriter

if TYPE_CHECKING:
    from allranks.agent.network import Setting


@dataclass(frozen=True)
class Start:
    """How this agent started.

    Attributes:
        channel: the socket to the starter.
        plain: why ranks start as plain interpreters, or None when they are forked.
        needs_torch: whether the ranks can be expected to need torch.
        began: when this process began, in seconds since 1970.
        stop: requests to end.
        listener: where the agents of other nodes dial; None but on node 0 of several.
        settings: what was decided about this node's network and CPUs.
    """

    channel: socket.socket
    plain: str | None
    needs_torch: bool
    began: float
    stop: Stop
    listener: socket.socket | None = None
    settings: tuple[Setting, ...] = ()


def run_node(node: NodeSpec, start: Start) -> Outcome:
    """Run the node's ranks to their end, tell how it went, and leave no process behind."""
    os.umask(0o666 & ~node.file_mode)  # For the agent's own files: the starter, and so the ranks, have the user's.
    folder = _folder(node)
    events = EventWriter(folder / contract.AGENT_EVENTS, node.file_mode)
    index = LogIndexWriter(folder, node.file_mode)
    heart = Heartbeat(folder / contract.HEARTBEAT, index, node.file_mode)
    heart.tick()
    usage = Usage(folder / contract.USAGE, node.file_mode)

    def idle() -> None:
        heart.tick()
        usage.tick(ranks.pids.values())

    ranks = Ranks(start.channel, idle, start.stop.check)
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


def fail_early(node: NodeSpec, error: AllranksError) -> NoReturn:
    """End at once, before there is any rank, because of an error, and tell it."""
    events = EventWriter(_folder(node) / contract.AGENT_EVENTS, node.file_mode)
    _tell_end(events, _refused(events, error))
    os._exit(error.exit_code)


def _refused(events: EventWriter, error: AllranksError) -> Outcome:
    complain(f"error: {error}")
    events.write(contract.ERROR, what=error.what, why=error.why, fix=error.fix, see=error.see)
    return Outcome("FAILED", error.exit_code, error.what)


def _folder(node: NodeSpec) -> Path:
    """Return the node's folder in the run's record; a scheduler begins attempts that nobody has made folders for."""
    folder = Path(node.run_dir, contract.node_dir(node.attempt, node.node))
    folder.mkdir(0o750 if node.file_mode & 0o040 else 0o700, parents=True, exist_ok=True)
    return folder


def _tell_end(events: EventWriter, outcome: Outcome) -> None:
    events.write(
        contract.ENDED,
        state=outcome.state,
        exit_code=outcome.exit_code,
        reason=outcome.reason,
        because_of_rank=outcome.rank,
        lost=outcome.lost,
    )


def _drive(node: NodeSpec, start: Start, ranks: Ranks, events: EventWriter, index: LogIndexWriter) -> Outcome:
    """Run the ranks; whatever goes wrong becomes an outcome."""
    python = None if start.plain is None else (sys.executable, *node.python_options)
    group = RankGroup(node, _folder(node), ranks, python, events, index, start.stop)
    try:
        return _outcome(node, start, group, events)
    except AllranksError as error:
        return _refused(events, error)
    except StarterGoneError as error:
        _kill_all(node)
        return Outcome("FAILED", 1, f"{error}; its ranks were killed with it")
    except Exception as error:  # noqa: BLE001 - the ranks must be ended, and the record must say why
        complain()
        return Outcome("FAILED", 1, f"the agent failed: {type(error).__name__}: {error}")


def _outcome(node: NodeSpec, start: Start, group: RankGroup, events: EventWriter) -> Outcome:
    try:
        if outcome := _see_to_the_end(node, start, group, events):
            return outcome
    except StopRequestedError as error:
        number = start.stop.signal or signal.SIGTERM
        events.write(contract.STOP_REQUESTED, signal=number.name, by=str(error))
        if group.first_failure is None:
            return Outcome("CANCELLED", 128 + number, str(error))
        # A rank had failed before, and the others were being ended for that.
    assert group.first_failure
    rank, ended = group.first_failure
    return failed(rank, ended.code)


def _may_have_saved(node: NodeSpec, stop: Stop) -> bool:
    """Return whether ranks can have saved and left on request; if not, their exit code is the script's own."""
    is_asked = stop.signal is not None or stop.warned or bool(os.environ.get(contract.END_TIME))
    return is_asked or Path(node.run_dir, contract.CHECKPOINTS_FILE).exists()


def _see_to_the_end(node: NodeSpec, start: Start, group: RankGroup, events: EventWriter) -> Outcome | None:
    """Run the ranks, with all their restarts; none is left when this returns or raises.

    Returns:
        How it has ended on all nodes; None if a rank of the only one has failed.
    """
    torch = TorchImport()
    if start.needs_torch:
        torch.finish()
    gc.enable()
    _tell_start(start, events)
    start.stop.ready()
    try:
        if node.nnodes > 1:
            return _run_with_others(node, start, torch, group, events)
        have_met = run_one_node(node, group, torch)
    except BaseException:
        group.give_up()
        raise
    if group.first_failure:
        return None
    leaving = group.left_with(contract.CONTINUE_LATER)
    if leaving is None:
        return succeeded(node, node.nproc_per_node, have_met)
    return PREEMPTED if _may_have_saved(node, start.stop) else failed(leaving, contract.CONTINUE_LATER)


def _tell_start(start: Start, events: EventWriter) -> None:
    events.write(
        contract.AGENT_STARTED,
        pid=os.getpid(),
        began=start.began,
        python=sys.executable,
        torch=sys.modules["torch"].__version__ if start.needs_torch else None,
        plain=start.plain,
    )
    if start.settings:
        events.write(contract.SETTINGS, settings=[asdict(setting) for setting in start.settings])
        complain("\n".join(map(str, start.settings)))


def _run_with_others(
    node: NodeSpec, start: Start, torch: TorchImport, group: RankGroup, events: EventWriter
) -> Outcome:
    # Imported here: a job of one node starts sooner without it.
    from allranks.agent.many_nodes import run_many_nodes

    return run_many_nodes(node, start.listener, torch, start.stop, group, events)


def _kill_all(node: NodeSpec) -> None:
    """Kill what the ranks had started: without the starter nobody else knows of it."""
    here = os.environ.get(contract.NODE_RANK)  # On the first node a scheduler's own commands may be marked too.
    for pid in marked(contract.RUN_DIR, node.run_dir):
        if told(pid, contract.NODE_RANK) == here:
            signal_process(pid, signal.SIGKILL)
