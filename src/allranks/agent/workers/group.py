"""The worker group: starts, watches, ends and restarts the ranks of this node; and the outcome of an attempt."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from allranks import contract
from allranks.agent.hangs import HangWatch
from allranks.agent.node_facts import NodeFacts
from allranks.agent.stop import StopRequest
from allranks.agent.workers.fork_policy import group_advice
from allranks.agent.workers.fork_server import ForkClient, RankExit
from allranks.agent.workers.rank import RankStart
from allranks.record.events import EventWriter
from allranks.record.logindex import LogIndexWriter
from allranks.record.spec import NodeSpec
from allranks.system.processes import catches, rank_ended

_KILL_PATIENCE = 5.0
#: Polling interval for a second Ctrl-C.
_HURRY_SECONDS = 0.1
#: A generation that lived longer than this resets the restart delay.
_HEALTHY_SECONDS = 60.0
_LONGEST_DELAY = 60.0


class Generation(NamedTuple):
    """The ranks of this node between two restarts, and their rendezvous."""

    restart: int  # 0 for the first generation
    node_rank: int
    nodes: int
    world_size: int
    first_rank: int  # the global rank of local rank 0
    master_addr: str
    master_port: int


class Backoff:
    """Restart delays in seconds: 0, then ``first``, then doubled after each quick failure in a row."""

    def __init__(self, first: float) -> None:
        self._first = first
        self._quick_failures = 0

    def delay(self, started: float) -> float:
        """Return the delay in seconds after a generation that started at ``started`` (monotonic clock) failed."""
        quick = time.monotonic() - started < _HEALTHY_SECONDS
        self._quick_failures = self._quick_failures + 1 if quick else 1
        if self._quick_failures < 2:
            return 0.0
        return float(min(_LONGEST_DELAY, self._first * 2.0 ** min(self._quick_failures - 2, 32)))


class WorkerGroup:
    """The ranks of this node, whose logs are in ``folder``. Its callers decide when ranks start and end."""

    def __init__(
        self,
        node: NodeSpec,
        folder: Path,
        client: ForkClient,
        events: EventWriter,
        index: LogIndexWriter,
        stop: StopRequest,
        hangs: HangWatch,
    ) -> None:
        #: Global rank and exit of the first failure; None if there is none, or if something else ended the ranks.
        self.first_failure: tuple[int, RankExit] | None = None
        self.hangs = hangs
        self._node = node
        self._folder = folder
        self._client = client
        self._events = events
        self._index = index
        self._stop = stop
        self._backoff = Backoff(node.restart_delay)
        self._started = 0.0
        self._ranks: range = range(0)  # the global ranks, by local rank
        self._recorded = 0
        self._facts: NodeFacts | None = None
        self._keeps_failure = True
        self._undelivered: list[tuple[int, signal.Signals]] = []  # (local rank, warning) not forwarded yet

    @property
    def is_running(self) -> bool:
        """Whether any rank is alive."""
        return bool(self._client.pids)

    @property
    def left_to_continue(self) -> int | None:
        """The first rank that exited to be continued later; None if there is none."""
        ended = (self._ranks[rank.local_rank] for rank in self._client.exits if rank.code == contract.CONTINUE_LATER)
        return next(ended, None)

    def start(self, generation: Generation) -> None:
        """Start a generation; raise a LaunchError if the process limit is reached."""
        first, restart = generation.first_rank, generation.restart
        self._ranks = range(first, first + self._node.nproc_per_node)
        self._index.watch(self._ranks)
        self._recorded, self.first_failure, self._keeps_failure = 0, None, True
        if self._facts:
            self._facts.close()
        self._facts = NodeFacts(Path(self._node.run_dir))
        starts = []
        written = []  # Log sizes now: earlier generations wrote that.
        for local_rank, rank in enumerate(self._ranks):
            variables = _variables(self._node, self._folder, generation, local_rank)
            out, err = (str(self._folder / contract.rank_log(rank, stream)) for stream in ("out", "err"))
            written.append({"out": _size(out), "err": _size(err)})
            stacks = str(self._folder / contract.rank_stacks(rank))
            starts.append(RankStart(local_rank, variables, out, err, stacks))
        pids = self._client.start(starts)
        self._started = time.monotonic()
        self.hangs.start({self._ranks[local_rank]: pid for local_rank, pid in pids.items()})
        self._events.write(
            contract.RANKS_STARTED,
            restart=restart,
            world_size=generation.world_size,
            nodes=generation.nodes,
            master_addr=generation.master_addr,
            master_port=generation.master_port,
            ranks=[
                {"rank": rank, "local_rank": local_rank, "pid": pids[local_rank], "written": written[local_rank]}
                for local_rank, rank in enumerate(self._ranks)
            ],
        )

    def poll(self, seconds: float) -> None:
        """Record the ranks that have exited; if there are none, wait for one, at most ``seconds``."""
        if self._recorded == len(self._client.exits):
            self._client.wait(seconds)
        for number in self._stop.take_warnings():
            self._events.write(contract.WARNED, signal=number.name)
            self._undelivered += [(local_rank, number) for local_rank in range(self._node.nproc_per_node)]
        self._forward_warnings()
        self._record_exits()
        self.hangs.tick(self._client.pids.values())

    def end(self, number: signal.Signals = signal.SIGTERM, patience: Callable[[], float] | None = None) -> None:
        """End all ranks by the signal ``number``, then by SIGKILL; a second Ctrl-C kills them at once.

        ``patience`` returns the seconds between both, and is called repeatedly; default: the job's ``stop_timeout``.
        """
        requested = patience or (lambda: self._node.stop_timeout)
        for current, seconds in ((number, requested), (signal.SIGKILL, lambda: _KILL_PATIENCE)):
            if not self._client.pids:
                break
            self._client.signal(current)
            self._client.signal(signal.SIGCONT)  # A stopped rank handles no other signal before this.
            began = time.monotonic()
            while self._client.pids and (left := began + seconds() - time.monotonic()) > 0:
                if self._stop.hurry and current != signal.SIGKILL:
                    break
                self._client.wait(min(left, _HURRY_SECONDS))
        self._record_exits()
        if self._facts and (lines := self._facts.of_gpus()):
            self._events.write(contract.NODE_FACTS, lines=lines)

    def abort(self) -> None:
        """End all ranks, by the signal of the stop request if there is one; later failures do not count."""
        self._keeps_failure = False
        self.end(self._stop.signal or signal.SIGTERM)

    def clear_failure(self) -> None:
        """Forget the first failure: the job continues, and a later stop request cancels it."""
        self.first_failure, self._keeps_failure = None, False

    def pause(self, restart: int, blamed: int | None, *, counted: bool) -> None:
        """Record a restart and the rank that caused it; wait the back-off delay if the restart is ``counted``."""
        delay, most = self._backoff.delay(self._started) if counted else 0.0, self._node.max_restarts
        self._events.write(contract.RESTART, restart=restart, delay=delay, because_of_rank=blamed, max_restarts=most)
        deadline = time.monotonic() + delay
        while (left := deadline - time.monotonic()) > 0:
            self._client.wait(left)

    def _forward_warnings(self) -> None:
        """Forward warnings to each rank as soon as it has a handler for them.

        Without a handler, a rank that still imports or loads data would die of the signal instead of saving.
        """
        for warning in self._undelivered.copy():
            local_rank, number = warning
            pid = self._client.pids.get(local_rank)
            if pid is not None and catches(pid, number) is not False:
                self._client.signal(number, local_rank)
                self._undelivered.remove(warning)

    def _record_exits(self) -> None:
        for ended in self._client.exits[self._recorded :]:
            rank = self._ranks[ended.local_rank]
            self._events.write(
                contract.RANK_EXITED, rank=rank, pid=ended.pid, code=ended.code, ended=ended.time, **_memory(ended)
            )
            is_failure = ended.code not in (0, contract.CONTINUE_LATER)
            if is_failure and self.first_failure is None and self._keeps_failure:
                self.first_failure = (rank, ended)
                self._record_facts(rank, ended.code)
        self._recorded = len(self._client.exits)

    def _record_facts(self, rank: int, code: int) -> None:
        """Record the node's facts about a failure before the other ranks are ended."""
        pids = {*self._client.pids.values(), *(ended.pid for ended in self._client.exits)}
        if self._facts and (lines := self._facts.collect(pids, was_killed=code == -signal.SIGKILL)):
            self._events.write(contract.NODE_FACTS, rank=rank, lines=lines)


def _memory(ended: RankExit) -> dict[str, int]:
    """Return peak memory and memory limit of a killed rank in bytes, as a possible cause."""
    if ended.code != -signal.SIGKILL:
        return {}
    from allranks.system import cgroups

    limits = (cgroups.memory(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return {"memory": ended.memory, "memory_limit": min(filter(None, limits))}


def _size(log: str) -> int:
    try:
        return Path(log).stat().st_size
    except OSError:
        return 0


def _variables(node: NodeSpec, folder: Path, generation: Generation, local_rank: int) -> dict[str, str]:
    """Return the variables that torchrun sets (section "Environment Variables" of its documentation), and ours."""
    number = generation.first_rank + local_rank
    rank, size = str(number), str(generation.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(node.nproc_per_node),
        "GROUP_RANK": str(generation.node_rank),
        "GROUP_WORLD_SIZE": str(generation.nodes),
        "ROLE_NAME": "default",  # torch supports several roles; all our ranks have this one.
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": generation.master_addr,
        "MASTER_PORT": str(generation.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(generation.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(node.max_restarts),
        "TORCHELASTIC_RUN_ID": node.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(folder / contract.rank_error(number, generation.restart)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        contract.RUN_ID: node.run_id,
        contract.RUN_DIR: node.run_dir,
        contract.ATTEMPT: str(node.attempt),
        contract.STEP_FILE: str(folder / contract.rank_step(number)),
    }


# --- outcome ---


class Outcome(NamedTuple):
    """The outcome of an attempt on one node or on all nodes."""

    state: str  # SUCCEEDED, FAILED, CANCELLED or PREEMPTED.
    exit_code: int  # The agent's.
    reason: str | None = None  # In one line.
    rank: int | None = None  # The global rank that failed first.
    lost: tuple[str, ...] = ()  # Names of the lost nodes, if that ended the attempt.


#: Ranks that exited on request. The source of the request restarts them.
PREEMPTED = Outcome("PREEMPTED", contract.CONTINUE_LATER, "the ranks have saved and exited, as requested")


def succeeded(node: NodeSpec, ranks: int, have_met: bool) -> Outcome:
    """Return the outcome of ranks that all succeeded; the reason says so if each of them trained alone."""
    reason = None
    if ranks > 1 and not have_met and (advice := group_advice(node)):
        reason = f"the {ranks} ranks formed no process group: each ran the whole script alone; {advice}"
    return Outcome("SUCCEEDED", 0, reason)


def failed(rank: int, code: int, host: str | None = None) -> Outcome:
    """Return the outcome of a failed rank; ``code`` is as in subprocess; ``host`` is given if there are several."""
    return Outcome("FAILED", code if code > 0 else 128 - code, rank_ended(rank, code, host), rank)
