"""torch's elastic agent, starting and watching its ranks our way.

The state machine (rendezvous, ranks, restarts, exit barrier) is torch's. What differs: ranks come from the
starter instead of a new interpreter each, and their end is heard of at once instead of at the next poll.
"""

from __future__ import annotations

import signal
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

from allranks.agent.backoff import Backoff
from allranks.agent.generation import ROLE, Generation
from allranks.agent.group import RankGroup
from allranks.agent.ranks import RankExit
from allranks.contract import NodeSpec

#: torch's agent sleeps this long before each look at the ranks; ours waits inside the look instead.
_NO_SLEEP = 1e-6
_LOOK_SECONDS = 1.0


class WarmElasticAgent(SimpleElasticAgent):
    """Drives the ranks of one node.

    Args:
        worker_spec: torch's own description of the ranks.
        node: the node's orders.
        group: the ranks. If they have been started, the agent takes them over as its first generation.
    """

    def __init__(self, worker_spec: WorkerSpec, node: NodeSpec, group: RankGroup) -> None:
        super().__init__(worker_spec)
        self._group = group
        self._to_take_over = group.generation
        self._backoff = Backoff(node.restart_delay)

    # --- what torch's agent asks of a subclass ---

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        generation, to_take_over = self._generation(worker_group), self._to_take_over
        self._to_take_over = None
        return self._group.pids if generation == to_take_over else self._group.start(generation)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._group.look(_LOOK_SECONDS if self._group.is_running else 0)
        if failed := self._group.failed:
            failures = {worker_group.workers[e.local_rank].global_rank: self._failure(e) for e in failed}
            return RunResult(WorkerState.FAILED, failures=failures)
        if self._group.is_running:
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in worker_group.workers})

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._group.end(signal.SIGTERM)

    def _shutdown(self, *_: Any, **__: Any) -> None:
        self._group.give_up()

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        blamed = self._group.first_failure[0] if self._group.first_failure else None
        self._group.forgive()
        self._group.end(signal.SIGTERM)
        self._group.pause(self._restart_count(), self._backoff.delay(self._group.started), blamed)
        # Nobody may hold on to the old store: a fixed port is free again only when the last of them lets go.
        self._store = worker_group.store = None
        super()._restart_workers(worker_group)

    def _construct_event(
        self, state: str, source: EventSource, worker: Worker | None = None, *_: Any, **__: Any
    ) -> Event:
        """Make torch's event without looking up the host's name, which can take seconds each time."""
        return Event(f"torchelastic.worker.status.{state}", source=source, metadata={})

    # --- ours ---

    def _generation(self, group: WorkerGroup) -> Generation:
        return Generation(
            restart=self._restart_count(),
            node_rank=int(group.group_rank or 0),
            nodes=int(group.group_world_size or 1),
            world_size=group.workers[0].world_size,
            ranks=tuple(worker.global_rank for worker in group.workers),
            master_addr=str(group.master_addr),
            master_port=int(group.master_port or 0),
        )

    def _restart_count(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _failure(self, ended: RankExit) -> ProcessFailure:
        return ProcessFailure(
            local_rank=ended.local_rank,
            pid=ended.pid,
            exitcode=ended.code,
            error_file=self._group.error_file(ended.local_rank),
        )


def describe(node: NodeSpec, rendezvous: Any) -> WorkerSpec:
    """Return torch's description of the node's ranks."""
    return WorkerSpec(
        role=ROLE,
        local_world_size=node.nproc_per_node,
        rdzv_handler=rendezvous,
        entrypoint=node.target,
        args=node.args,
        max_restarts=node.max_restarts,
        monitor_interval=_NO_SLEEP,
    )
