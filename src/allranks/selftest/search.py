"""Fault isolation: one rank on each node runs this to find the node or link that makes the job slow or fail.

The first node assigns groups through the store, since process groups may fail. Each measurement runs in separate
processes, which may hang or crash.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from allranks.record.selftest import SearchResult, send
from allranks.runtime import device as devices
from allranks.runtime import environment, rendezvous
from allranks.selftest import collectives
from allranks.selftest.halving import Group, IsolationResult, Result, find

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch._C._distributed_c10d import Store

    from allranks.runtime.environment import RankEnvironment

#: Bytes that each node sends to each other node of its group.
SIZE = 1 << 21
#: Least and most repeats (the first one opens connections), and the seconds after which to stop.
_LEAST, _MOST, _ENOUGH = 2, 10, 0.5
_LATER = 5
#: Time limits of a measurement, and of a round including the reports, as multiples of the limit of an operation.
_MEASUREMENT, _ROUND = 3, 4


@dataclass(frozen=True)
class Limits:
    """Limits of a search."""

    operation: float = 10.0  # Seconds for one operation.
    #: Seconds until all nodes must have connected. They import torch first, which takes minutes if many nodes read it
    #: from one disk for the first time.
    coming: float = 300.0
    least: float = 0.0  # Least bytes per second of good nodes; 0 if unknown.


class _Silent(Exception):  # noqa: N818 - no error: the search ends with these nodes as its result
    """Nodes have stopped answering."""

    def __init__(self, nodes: list[int]) -> None:
        super().__init__(nodes)
        self.nodes = nodes


class _Node:
    """One node (its rank is the node's number): works in the groups that the first node assigns through the store."""

    def __init__(self, me: RankEnvironment, store: Store, limits: Limits) -> None:
        self.me, self.store, self.limits = me, store, limits
        self._round = 0
        # Children are forked from a process that has imported torch, without a store or threads.
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([collectives.__name__])

    def come(self) -> None:
        """Report that this node is ready, once it has imported torch."""
        first = self._context.Process(daemon=True)  # It does nothing.
        first.start()  # Returns once torch is imported.
        first.join()
        self.store.set(f"here/{self.me.rank}", socket.gethostname())

    def serve(self) -> None:
        """Take part in all measurements."""
        wait = timedelta(seconds=self.limits.coming + _ROUND * self.limits.operation)
        while True:
            self.store.wait([f"round/{self._round}"], wait)
            groups = json.loads(self.store.get(f"round/{self._round}"))
            if groups is None:
                self.store.set(f"left/{self.me.rank}", "")
                return
            self.take_part(groups)

    def take_part(self, groups: Sequence[Sequence[int]]) -> None:
        """Do this node's part of a round, and report the result."""
        name = f"round/{self._round}"
        self._round += 1
        for number, group in enumerate(groups):
            if self.me.rank in group:
                task = Task(
                    f"allranks/search/{self.me.restart}/{name}/group/{number}",
                    place=group.index(self.me.rank),
                    count=len(group),
                    address=self.me.master_addr,
                    port=self.me.master_port,
                    seconds=self.limits.operation,
                    limit=_MEASUREMENT * self.limits.operation,
                )
                began = time.monotonic()
                answer = self._do(task)
                done = {"answer": answer, "after": time.monotonic() - began}
                self.store.set(f"{name}/done/{self.me.rank}", json.dumps(done))

    def _do(self, task: Task) -> float | str:
        """Run a task in a subprocess; return its result or how it failed."""
        receiver, sender = self._context.Pipe(duplex=False)
        child = self._context.Process(target=work, args=(task, sender), daemon=True)
        child.start()
        sender.close()
        try:
            answer: float | str = receiver.recv() if receiver.poll(task.limit) else "it hangs"
        except EOFError:
            child.join()
            answer = f"it exited with code {child.exitcode}"
        child.kill()
        child.join()
        receiver.close()
        return answer


class _First(_Node):
    """The first node: assigns groups, and collects their results."""

    def __init__(self, me: RankEnvironment, store: Store, limits: Limits) -> None:
        super().__init__(me, store, limits)
        self.nodes = tuple(range(me.world_size))
        self.errors: dict[Group, str] = {}

    def search(self) -> IsolationResult:
        """Find the faulty nodes and links; raise _Silent if nodes do not connect, or stop answering."""
        self._wait_for("here", self.nodes, self.limits.coming)
        limit = SIZE / self.limits.least if self.limits.least else None
        return find(self.nodes, self._measure, limit=limit)

    def hosts(self) -> tuple[str, ...]:
        """Return the nodes' hostnames; empty for one that has not connected."""
        keys = [f"here/{node}" for node in self.nodes]
        return tuple(self.store.get(key).decode() if self.store.check([key]) else "" for key in keys)

    def error_of(self, nodes: Group) -> str:
        """Return the error of the smallest failed group with these nodes; empty if none failed."""
        groups = sorted((group for group in self.errors if {*nodes} <= {*group}), key=len)
        return self.errors[groups[0]] if groups else ""

    def end(self) -> None:
        """End the search on the other nodes, and wait for their confirmation: the store may end with this process."""
        self.store.set(f"round/{self._round}", json.dumps(None))
        self._wait_for("left", self.nodes[1:], self.limits.operation)

    def _measure(self, groups: Sequence[Group]) -> list[Result]:
        name = f"round/{self._round}"
        until = time.monotonic() + _ROUND * self.limits.operation
        self.store.set(name, json.dumps(groups))
        self.take_part(groups)
        nodes = [node for group in groups for node in group]
        self._wait_for(f"{name}/done", nodes, until - time.monotonic())
        return [self._result(name, group) for group in groups]

    def _result(self, name: str, group: Group) -> Result:
        done = [json.loads(self.store.get(f"{name}/done/{node}")) for node in group]
        errors = [one for one in done if isinstance(one["answer"], str)]
        if errors:  # Report the first one: the others only waited for that node.
            self.errors[group] = min(errors, key=lambda one: float(one["after"]))["answer"]
        return None if errors else max(one["answer"] for one in done)

    def _wait_for(self, name: str, nodes: Sequence[int], seconds: float) -> None:
        keys = {node: f"{name}/{node}" for node in nodes}
        try:
            self.store.wait([*keys.values()], timedelta(seconds=max(seconds, 1.0)))
        except distributed.DistError:
            silent = [node for node, key in keys.items() if not self.store.check([key])]
            if silent:
                raise _Silent(silent) from None


# --- a node's part in one measurement, in a separate process, which can be killed if an operation hangs ---


@dataclass(frozen=True)
class Task:
    """One node's part in a measurement: its place in its group of ``count`` nodes, and the address of their store.

    ``seconds`` is the time limit of an operation, and ``limit`` that of the measurement.
    """

    name: str
    place: int
    count: int
    address: str
    port: int
    seconds: float
    limit: float


def work(task: Task, answer: Connection[Any, Any]) -> None:
    """Take part in a measurement; answer with the seconds that it took, or with the error."""
    signal.alarm(math.ceil(task.limit) + _LATER)  # In case the parent, which would kill it before, is gone.
    try:
        answer.send(_measure(task))
    except distributed.DistStoreError:  # Its message has only names of keys.
        answer.send(f"others did not answer within {task.seconds:g} s")
    except Exception as error:  # noqa: BLE001 - any error is a result
        answer.send(str(error).strip().split("\n")[0] or type(error).__name__)
    os._exit(0)  # The backend's threads may hang.


def _measure(task: Task) -> float:
    limit = timedelta(seconds=task.seconds)
    rank = environment.detect()
    backend, device = devices.choose(None, None, rank)
    devices.bind(device, rank)
    store = PrefixStore(task.name, TCPStore(task.address, task.port, is_master=False, timeout=limit))
    distributed.init_process_group(backend, store=store, rank=task.place, world_size=task.count, timeout=limit)
    values = torch.full((SIZE // 4,), task.place + 1.0, device=device)
    distributed.all_reduce(values)
    _expect(values, task.count * (task.count + 1) // 2)
    seconds = _send_to_all(task, device)
    store.set(f"done/{task.place}", "")
    store.wait([f"done/{place}" for place in range(task.count)], limit)  # An early exit would fail the others.
    return seconds


def _send_to_all(task: Task, device: torch.device) -> float:
    """Send from each node to each other one in turn; return the best time of the slowest transfer, in seconds.

    A collective operation of many nodes uses only few of the links between them; this uses all.
    """
    best = [math.inf] * task.count
    taken = 0.0
    for turn in range(_MOST):
        began = time.perf_counter()
        for shift in range(1, task.count):
            best[shift] = min(best[shift], _send(task, shift, device))
        longest = torch.tensor([time.perf_counter() - began], device=device)
        distributed.all_reduce(longest, distributed.ReduceOp.MAX)
        taken += float(longest)
        if turn + 1 >= _LEAST and taken > _ENOUGH:  # On all nodes alike.
            break
    return max(best[1:])


def _send(task: Task, shift: int, device: torch.device) -> float:
    target, source = (task.place + shift) % task.count, (task.place - shift) % task.count
    mine = torch.full((SIZE // 4,), task.place + 1.0, device=device)
    theirs = torch.zeros_like(mine)
    ways = [distributed.P2POp(distributed.isend, mine, target), distributed.P2POp(distributed.irecv, theirs, source)]
    seconds = collectives.timed(device, partial(collectives.exchange, ways))
    _expect(theirs, source + 1)
    return seconds


def _expect(values: torch.Tensor, number: float) -> None:
    least, greatest = float(values.min()), float(values.max())
    if least != number or greatest != number:
        raise ValueError(f"a wrong result: numbers from {least:g} to {greatest:g}, and all must be {number:g}")


# --- the program ---


def main() -> None:
    """Run the search on every node; the first one reports the result."""
    parser = argparse.ArgumentParser(prog="allranks.selftest.search")
    parser.add_argument("--timeout", type=float, default=Limits.operation, help="seconds that an operation may take")
    parser.add_argument(
        "--coming", type=float, default=Limits.coming, help="seconds within which all nodes must have connected"
    )
    parser.add_argument(
        "--least", type=float, default=Limits.least, help="bytes a second that are not slow; 0: unknown"
    )
    given = parser.parse_args()
    limits = Limits(given.timeout, given.coming, given.least)
    me = environment.detect()
    store = PrefixStore(f"allranks/search/{me.restart}", rendezvous.open_store(me, timedelta(seconds=limits.coming)))
    if me.rank:
        node = _Node(me, store, limits)
        node.come()
        node.serve()
        return
    first = _First(me, store, limits)
    report = SearchResult(0)
    try:
        first.come()
        report = _report(first, first.search())
        first.end()
    except _Silent as silent:
        report = replace(report, silent=tuple(silent.nodes))
    send(replace(report, hosts=first.hosts()))
    if report.silent:
        raise SystemExit(1)  # Without waiting for the others: their launcher ends them.


def _report(first: _First, found: IsolationResult) -> SearchResult:
    fields = asdict(found)
    for culprit in fields["culprits"]:
        culprit["error"] = first.error_of(culprit["nodes"])
    return SearchResult(
        0,
        **fields,
        size=SIZE,
        least=first.limits.least,
        backend=devices.choose(None, None, first.me)[0],
        error=first.error_of(first.nodes),
    )


if __name__ == "__main__":
    main()
