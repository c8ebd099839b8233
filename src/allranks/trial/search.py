"""What one rank on each node runs when nodes are slow or fail together: the search for the one that is at fault.

The first one says through the store who works with whom, and halves them; no process group is needed for that, since
it is process groups that fail. Each measurement is done in processes of their own, which may hang or crash.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING

from torch import distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from allranks.runs.trial import Searched, tell
from allranks.runtime import device, environment, rendezvous
from allranks.trial import search_child
from allranks.trial.halves import Group
from allranks.trial.halving import Outcome, Result, find

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from allranks.runtime.environment import RankEnvironment

#: A measurement may take so many times what one operation may, and whoever waits for it waits once longer.
_MEASUREMENT, _LATE = 3, 1


@dataclass(frozen=True)
class Asked:
    """How many seconds things may take: one operation, and the coming of all nodes."""

    operation: float = 10.0
    #: They import torch before, which takes minutes where many nodes read it from one disk for the first time.
    coming: float = 300.0
    #: Bytes a second that good nodes send at least; 0: nobody knows.
    least: float = 0.0

    @property
    def measurement(self) -> float:
        """All of one measurement."""
        return _MEASUREMENT * self.operation

    @property
    def round(self) -> float:
        """Until all nodes must have said how a measurement went."""
        return self.measurement + _LATE * self.operation


class _Silent(Exception):  # noqa: N818 - it is no error: it ends the search with what was searched for
    """Nodes say nothing any more."""

    def __init__(self, nodes: list[int]) -> None:
        super().__init__(nodes)
        self.nodes = nodes


class _Node:
    """One node: does what the first one says.

    Args:
        me: who it is; ranks count nodes here.
        store: what all nodes share.
        asked: how long things may take.
    """

    def __init__(self, me: RankEnvironment, store: Store, asked: Asked) -> None:
        self.me, self.store, self.asked = me, store, asked
        self._round = 0
        # The children are forked from a process that has imported torch, and has neither a store nor a thread.
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([search_child.__name__])

    def come(self) -> None:
        """Say that this node is here."""
        first = self._context.Process(target=search_child.nothing, daemon=True)
        first.start()  # It waits until torch is imported.
        first.join()
        self.store.set(f"here/{self.me.rank}", socket.gethostname())

    def serve(self) -> None:
        """Take part in all measurements."""
        wait = timedelta(seconds=self.asked.coming + self.asked.round)
        while True:
            self.store.wait([f"round/{self._round}"], wait)
            groups = json.loads(self.store.get(f"round/{self._round}"))
            if groups is None:
                self.store.set(f"left/{self.me.rank}", "")
                return
            self.take_part(groups)

    def take_part(self, groups: Sequence[Sequence[int]]) -> None:
        """Do this node's part of a round, and say how it went."""
        name = f"round/{self._round}"
        self._round += 1
        for number, group in enumerate(groups):
            if self.me.rank in group:
                place = group.index(self.me.rank)
                task = self._task(f"{name}/group/{number}", place, len(group))
                began = time.monotonic()
                answer = self._do(task)
                done = {"answer": answer, "after": time.monotonic() - began}
                self.store.set(f"{name}/done/{self.me.rank}", json.dumps(done))

    def _task(self, name: str, place: int, count: int) -> search_child.Task:
        where = self.me.master_addr, self.me.master_port
        limits = self.asked.operation, self.asked.measurement
        return search_child.Task(f"allranks/search/{self.me.restart}/{name}", place, count, *where, *limits)

    def _do(self, task: search_child.Task) -> float | str:
        """Have a child do a task; return its answer, or what became of it."""
        receiver, sender = self._context.Pipe(duplex=False)
        child = self._context.Process(target=search_child.work, args=(task, sender), daemon=True)
        child.start()
        sender.close()
        try:
            answer: float | str = receiver.recv() if receiver.poll(task.limit) else "it hangs"
        except EOFError:
            child.join()
            answer = f"it ended with exit code {child.exitcode}"
        child.kill()
        child.join()
        receiver.close()
        return answer


class _First(_Node):
    """The first node: says who works with whom."""

    def __init__(self, me: RankEnvironment, store: Store, asked: Asked) -> None:
        super().__init__(me, store, asked)
        self.nodes = tuple(range(me.world_size))
        self.errors: dict[Group, str] = {}

    def search(self) -> Outcome:
        """Find what is at fault.

        Raises:
            _Silent: nodes do not come, or say nothing any more.
        """
        self._wait_for("here", self.nodes, self.asked.coming)
        limit = search_child.SIZE / self.asked.least if self.asked.least else None
        return find(self.nodes, self._measure, limit=limit)

    def hosts(self) -> tuple[str, ...]:
        """Return what the nodes call themselves; empty for one that has not come."""
        keys = [f"here/{node}" for node in self.nodes]
        return tuple(self.store.get(key).decode() if self.store.check([key]) else "" for key in keys)

    def error_of(self, nodes: Group) -> str:
        """Return what the smallest group with these nodes failed with; empty: none did."""
        groups = sorted((group for group in self.errors if {*nodes} <= {*group}), key=len)
        return self.errors[groups[0]] if groups else ""

    def end(self) -> None:
        """Tell the others that it is over, and wait until they know: the store may end with this process.

        Raises:
            _Silent: a node says nothing any more.
        """
        self.store.set(f"round/{self._round}", json.dumps(None))
        self._wait_for("left", self.nodes[1:], self.asked.operation)

    def _measure(self, groups: Sequence[Group]) -> list[Result]:
        name = f"round/{self._round}"
        until = time.monotonic() + self.asked.round
        self.store.set(name, json.dumps(groups))
        self.take_part(groups)
        nodes = [node for group in groups for node in group]
        self._wait_for(f"{name}/done", nodes, until - time.monotonic())
        return [self._result(name, group) for group in groups]

    def _result(self, name: str, group: Group) -> Result:
        done = [json.loads(self.store.get(f"{name}/done/{node}")) for node in group]
        errors = [one for one in done if isinstance(one["answer"], str)]
        if errors:  # Of the one that failed first: the others waited for it.
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


def main() -> None:
    """Search, on every node; the first one tells what was found."""
    parser = argparse.ArgumentParser(prog="allranks.trial.search")
    parser.add_argument("--timeout", type=float, default=Asked.operation, help="seconds that an operation may take")
    parser.add_argument("--coming", type=float, default=Asked.coming, help="seconds until all nodes must have come")
    parser.add_argument("--least", type=float, default=Asked.least, help="bytes a second that are not slow; 0: unknown")
    given = parser.parse_args()
    asked = Asked(given.timeout, given.coming, given.least)
    me = environment.detect()
    store = PrefixStore(f"allranks/search/{me.restart}", rendezvous.open_store(me, timedelta(seconds=asked.coming)))
    if me.rank:
        node = _Node(me, store, asked)
        node.come()
        node.serve()
        return
    told = _search(_First(me, store, asked))
    tell(told)
    if told.silent:
        raise SystemExit(1)  # The others are not waited for: what started them ends them.


def _search(first: _First) -> Searched:
    told = Searched(first.me.rank)
    try:
        first.come()
        told = _told(first, first.search())
        first.end()
    except _Silent as silent:
        told = replace(told, silent=tuple(silent.nodes))
    return replace(told, hosts=first.hosts())


def _told(first: _First, found: Outcome) -> Searched:
    culprits = [{**asdict(culprit), "error": first.error_of(culprit.nodes)} for culprit in found.culprits]
    return Searched(
        first.me.rank,
        is_bad=found.is_bad,
        culprits=tuple(culprits),
        more=found.more,
        seconds=found.seconds,
        usual=found.usual,
        size=search_child.SIZE,
        least=first.asked.least,
        backend=device.choose(None, None, first.me)[0],
        error=first.error_of(first.nodes),
        rounds=found.rounds,
    )


if __name__ == "__main__":
    main()
