"""torch's elastic agent, starting and watching its ranks our way.

The state machine (rendezvous, ranks, restarts, exit barrier) is torch's. What differs: ranks come from the
starter instead of a new interpreter each, and their end is heard of at once instead of at the next poll.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from allranks import contract
from allranks.agent.rank import RankOrder
from allranks.agent.ranks import RankExit, Ranks
from allranks.agent.stop import Stop
from allranks.contract import NodeSpec
from allranks.runs.events import EventWriter
from allranks.runs.logindex import LogIndexWriter

#: torch's agent sleeps this long before each look at the ranks; ours waits inside the look instead.
_NO_SLEEP = 1e-6
_LOOK_SECONDS = 1.0
#: A generation that lived longer than this is no part of a row of failures: the delay starts over.
_HEALTHY_SECONDS = 60.0
_LONGEST_DELAY = 60.0
_KILL_PATIENCE = 5.0
#: How soon a user in a hurry is noticed.
_HURRY_SECONDS = 0.1


class WarmElasticAgent(SimpleElasticAgent):
    """Drives the ranks of one node.

    Args:
        worker_spec: torch's own description of the ranks.
        node: the node's orders.
        folder: the node's folder in the run's record.
        ranks: the ranks, as the starter tells of them.
        python: command line of the interpreter up to the script, or None to fork warm ranks.
        events: where to tell what happens.
        index: told which logs to watch.
        stop: requests to end; a hurried one cuts the patience with the ranks short.
    """

    def __init__(
        self,
        worker_spec: WorkerSpec,
        node: NodeSpec,
        folder: Path,
        ranks: Ranks,
        python: tuple[str, ...] | None,
        events: EventWriter,
        index: LogIndexWriter,
        stop: Stop,
    ) -> None:
        super().__init__(worker_spec)
        self._node = node
        self._folder = folder
        self._ranks = ranks
        self._python = python
        self._events = events
        self._index = index
        self._told = 0
        self._quick_failures = 0
        self._started = 0.0
        self._stop = stop
        self._blames = True
        self.first_failure: tuple[int, RankExit] | None = None

    # --- what torch's agent asks of a subclass ---

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._index.watch(worker.global_rank for worker in worker_group.workers)
        self._told, self.first_failure, self._blames = 0, None, True
        pids = self._ranks.start({w.local_rank: self._order(worker_group, w) for w in worker_group.workers})
        self._started = time.monotonic()
        self._events.write(
            contract.RANKS_STARTED,
            restart=self._restart_count(),
            world_size=worker_group.workers[0].world_size,
            master_addr=worker_group.master_addr,
            master_port=worker_group.master_port,
            ranks=[
                {"rank": w.global_rank, "local_rank": w.local_rank, "pid": pids[w.local_rank]}
                for w in worker_group.workers
            ],
        )
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._told == len(self._ranks.exits) and self._ranks.pids:
            self._ranks.wait(_LOOK_SECONDS)
        self._tell_exits(worker_group)
        failed = [ended for ended in self._ranks.exits if ended.code]
        if failed:
            return RunResult(WorkerState.FAILED, failures=self._failures(worker_group, failed))
        if self._ranks.pids:
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in worker_group.workers})

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._end_ranks(signal.SIGTERM)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        self._blames = False
        self._end_ranks(death_sig)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # The job goes on: who asks for its end from now on cancels it.
        failure, self.first_failure, self._blames = self.first_failure, None, False
        self._end_ranks(signal.SIGTERM)
        delay = self._restart_delay()
        self._events.write(
            contract.RESTART,
            restart=self._restart_count(),
            delay=delay,
            because_of_rank=failure[0] if failure else None,
        )
        deadline = time.monotonic() + delay
        while (left := deadline - time.monotonic()) > 0:
            self._ranks.wait(left)
        # Nobody may hold on to the old store: a fixed port is free again only when the last of them lets go.
        self._store = worker_group.store = None
        super()._restart_workers(worker_group)

    def _construct_event(
        self, state: str, source: EventSource, worker: Worker | None = None, *_: Any, **__: Any
    ) -> Event:
        """Make torch's event without looking up the host's name, which can take seconds each time."""
        return Event(f"torchelastic.worker.status.{state}", source=source, metadata={})

    # --- ours ---

    def _order(self, group: WorkerGroup, worker: Worker) -> RankOrder:
        def log(stream: str) -> str:
            return str(self._folder / contract.rank_log(worker.global_rank, stream))

        return RankOrder(
            kind=self._node.kind,
            target=self._node.target,
            args=self._node.args,
            python=self._python,
            variables=self._variables(group, worker),
            out=log("out"),
            err=log("err"),
            file_mode=self._node.file_mode,
        )

    def _variables(self, group: WorkerGroup, worker: Worker) -> dict[str, str]:
        """Return what torchrun gives a rank (its documentation, section Environment Variables), and ours."""
        spec = group.spec
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_NAME": spec.role,
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self._restart_count()),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": self._node.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": self._error_file(worker.global_rank),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            contract.RUN_ID: self._node.run_id,
            contract.RUN_DIR: self._node.run_dir,
            contract.ATTEMPT: str(self._node.attempt),
        }

    def _error_file(self, rank: int) -> str:
        return str(self._folder / f"rank-{rank}.error-{self._restart_count()}.json")

    def _restart_count(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _tell_exits(self, group: WorkerGroup) -> None:
        for ended in self._ranks.exits[self._told :]:
            rank = group.workers[ended.local_rank].global_rank
            self._events.write(contract.RANK_EXITED, rank=rank, pid=ended.pid, code=ended.code, ended=ended.time)
            if ended.code and self.first_failure is None and self._blames:
                self.first_failure = (rank, ended)
        self._told = len(self._ranks.exits)

    def _failures(self, group: WorkerGroup, failed: Iterable[RankExit]) -> dict[int, ProcessFailure]:
        ranks = {ended.local_rank: group.workers[ended.local_rank].global_rank for ended in failed}
        return {
            ranks[ended.local_rank]: ProcessFailure(
                local_rank=ended.local_rank,
                pid=ended.pid,
                exitcode=ended.code,
                error_file=self._error_file(ranks[ended.local_rank]),
            )
            for ended in failed
        }

    def _end_ranks(self, number: signal.Signals) -> None:
        """End all ranks: ``number``, patience, then SIGKILL; at once when the user is in a hurry."""
        for current, patience in ((number, self._node.stop_timeout), (signal.SIGKILL, _KILL_PATIENCE)):
            if not self._ranks.pids:
                break
            self._ranks.signal(current)
            deadline = time.monotonic() + patience
            while self._ranks.pids and (left := deadline - time.monotonic()) > 0:
                if self._stop.hurry and current != signal.SIGKILL:
                    break
                self._ranks.wait(min(left, _HURRY_SECONDS))
        self._tell_exits(self._worker_group)

    def _restart_delay(self) -> float:
        """Return how long to wait: nothing once, then twice as long for each failure in a row."""
        quick = time.monotonic() - self._started < _HEALTHY_SECONDS
        self._quick_failures = self._quick_failures + 1 if quick else 1
        if self._quick_failures < 2:
            return 0.0
        delay = self._node.restart_delay * 2.0 ** min(self._quick_failures - 2, 32)
        return float(min(_LONGEST_DELAY, delay))


def describe(node: NodeSpec, rendezvous: Any) -> WorkerSpec:
    """Return torch's description of the node's ranks."""
    return WorkerSpec(
        role="default",
        local_world_size=node.nproc_per_node,
        rdzv_handler=rendezvous,
        entrypoint=node.target,
        args=node.args,
        max_restarts=node.max_restarts,
        monitor_interval=_NO_SLEEP,
    )
