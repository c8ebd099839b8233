"""The worker group: the ranks of this node, started, watched, ended, recorded and started again; and their outcome."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
#: How soon a second Ctrl-C is noticed.
_HURRY_SECONDS = 0.1
#: After a generation that lived longer than this the delays of restarts start over.
_HEALTHY_SECONDS = 60.0
_LONGEST_DELAY = 60.0


@dataclass(frozen=True)
class Generation:
    """The ranks of this node between two restarts, and where they meet those of other nodes."""

    restart: int  # 0 for the first generation
    node_rank: int
    nodes: int
    world_size: int
    first_rank: int  # the global rank of local rank 0
    master_addr: str
    master_port: int


class Backoff:
    """Delays of restarts in seconds: none, then ``first``, then twice as long for each quick failure in a row."""

    def __init__(self, first: float) -> None:
        self._first = first
        self._quick_failures = 0

    def delay(self, started: float) -> float:
        """Return how many seconds to wait after the failure of the generation started at ``started`` (monotonic)."""
        quick = time.monotonic() - started < _HEALTHY_SECONDS
        self._quick_failures = self._quick_failures + 1 if quick else 1
        if self._quick_failures < 2:
            return 0.0
        return float(min(_LONGEST_DELAY, self._first * 2.0 ** min(self._quick_failures - 2, 32)))


class WorkerGroup:
    """The ranks of this node, whose logs are in ``folder``. It decides nothing: its callers do."""

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
        #: The global rank that failed first, and its end, if it is to blame for what follows.
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
        self._undelivered: list[tuple[int, signal.Signals]] = []  # warnings, and the local ranks that they are for

    @property
    def is_running(self) -> bool:
        """Whether a rank is alive."""
        return bool(self._client.pids)

    @property
    def left_to_continue(self) -> int | None:
        """The first rank that has saved and exited on request, to be started again later; None if there is none."""
        ended = (self._ranks[rank.local_rank] for rank in self._client.exits if rank.code == contract.CONTINUE_LATER)
        return next(ended, None)

    def start(self, generation: Generation) -> None:
        """Start a generation; raise a LaunchError if no more processes are allowed."""
        first, restart = generation.first_rank, generation.restart
        self._ranks = range(first, first + self._node.nproc_per_node)
        self._index.watch(self._ranks)
        self._recorded, self.first_failure, self._keeps_failure = 0, None, True
        if self._facts:
            self._facts.close()
        self._facts = NodeFacts(Path(self._node.run_dir))
        starts = []
        written = []  # What is in a rank's logs by now is of earlier generations.
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
        """Record the ranks that have ended; if there are none, wait so long for one."""
        if self._recorded == len(self._client.exits):
            self._client.wait(seconds)
        for number in self._stop.take_warnings():
            self._events.write(contract.WARNED, signal=number.name)
            self._undelivered += [(local_rank, number) for local_rank in range(self._node.nproc_per_node)]
        self._forward_warnings()
        self._record_exits()
        self.hangs.tick(self._client.pids.values())

    def end(self, number: signal.Signals = signal.SIGTERM, patience: Callable[[], float] | None = None) -> None:
        """End all ranks: by the signal ``number``, then SIGKILL; at once after a second Ctrl-C.

        ``patience`` gives the seconds between the two, which may change meanwhile; by default the job's.
        """
        requested = patience or (lambda: self._node.stop_timeout)
        for current, seconds in ((number, requested), (signal.SIGKILL, lambda: _KILL_PATIENCE)):
            if not self._client.pids:
                break
            self._client.signal(current)
            self._client.signal(signal.SIGCONT)  # A rank that is stopped hears nothing before that.
            began = time.monotonic()
            while self._client.pids and (left := began + seconds() - time.monotonic()) > 0:
                if self._stop.hurry and current != signal.SIGKILL:
                    break
                self._client.wait(min(left, _HURRY_SECONDS))
        self._record_exits()
        if self._facts and (lines := self._facts.of_gpus()):
            self._events.write(contract.NODE_FACTS, lines=lines)

    def abort(self) -> None:
        """End all ranks, with the signal of a request to stop if there is one; failures count no more."""
        self._keeps_failure = False
        self.end(self._stop.signal or signal.SIGTERM)

    def clear_failure(self) -> None:
        """Blame no rank for what follows: the job continues, and a request to stop from now on cancels it."""
        self.first_failure, self._keeps_failure = None, False

    def pause(self, restart: int, blamed: int | None, *, counted: bool) -> None:
        """Record a restart, and the rank to blame; wait before it if it is one of those that count."""
        delay, most = self._backoff.delay(self._started) if counted else 0.0, self._node.max_restarts
        self._events.write(contract.RESTART, restart=restart, delay=delay, because_of_rank=blamed, max_restarts=most)
        deadline = time.monotonic() + delay
        while (left := deadline - time.monotonic()) > 0:
            self._client.wait(left)

    def _forward_warnings(self) -> None:
        """Forward warnings to the ranks that handle them; others get them once they do, if they ever do.

        A rank that still imports or loads its data would die of a warning instead of saving after its first step.
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
        """Record what only this node knows of a failure, before the other ranks are ended."""
        pids = {*self._client.pids.values(), *(ended.pid for ended in self._client.exits)}
        if self._facts and (lines := self._facts.collect(pids, was_killed=code == -signal.SIGKILL)):
            self._events.write(contract.NODE_FACTS, rank=rank, lines=lines)


def _memory(ended: RankExit) -> dict[str, int]:
    """Return a killed rank's peak memory and its limit in bytes: they may be why."""
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
    """Return what torchrun gives a rank (its documentation, section Environment Variables), and ours."""
    number = generation.first_rank + local_rank
    rank, size = str(number), str(generation.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(node.nproc_per_node),
        "GROUP_RANK": str(generation.node_rank),
        "GROUP_WORLD_SIZE": str(generation.nodes),
        "ROLE_NAME": "default",  # torch knows ranks of several roles; all of ours have this one.
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


# --- how it all ended ---


@dataclass(frozen=True)
class Outcome:
    """How a node's part of an attempt, or the attempt on all its nodes, ended."""

    state: str  # SUCCEEDED, FAILED, CANCELLED or PREEMPTED.
    exit_code: int  # Of the agent.
    reason: str | None = None  # In one line.
    rank: int | None = None  # The global rank that failed first.
    lost: tuple[str, ...] = ()  # The names of the nodes that were lost, if that ended it.


#: Of ranks that a request has ended: its source starts them again.
PREEMPTED = Outcome("PREEMPTED", contract.CONTINUE_LATER, "the ranks have saved and exited, as requested")


def succeeded(node: NodeSpec, ranks: int, have_met: bool) -> Outcome:
    """Return the success of so many ranks; the reason says so if each of them has trained alone."""
    reason = None
    if ranks > 1 and not have_met and (advice := group_advice(node)):
        reason = f"the {ranks} ranks formed no process group: each ran the whole script alone; {advice}"
    return Outcome("SUCCEEDED", 0, reason)


def failed(rank: int, code: int, host: str | None = None) -> Outcome:
    """Return the failure of a rank, on a host if there are several; ``code`` is as Python gives it."""
    return Outcome("FAILED", code if code > 0 else 128 - code, rank_ended(rank, code, host), rank)
