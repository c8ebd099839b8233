"""One node's part in one measurement, in a separate process, which can be killed if an operation hangs."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from allranks.runtime import device as devices
from allranks.runtime import environment
from allranks.selftest.collectives import synchronize

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

#: Bytes that each node sends to each other node of its group.
SIZE = 1 << 21
#: Least and most repeats (the first one opens connections), and the seconds after which to stop.
_LEAST, _MOST, _ENOUGH = 2, 10, 0.5
_LATER = 5


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


def nothing() -> None:
    """Do nothing: a process that has run it has done its imports."""


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
    synchronize(device)
    began = time.perf_counter()
    ways = [distributed.P2POp(distributed.isend, mine, target), distributed.P2POp(distributed.irecv, theirs, source)]
    for way in distributed.batch_isend_irecv(ways):
        way.wait()
    synchronize(device)
    seconds = time.perf_counter() - began
    _expect(theirs, source + 1)
    return seconds


def _expect(values: torch.Tensor, number: float) -> None:
    least, greatest = float(values.min()), float(values.max())
    if least != number or greatest != number:
        raise ValueError(f"a wrong result: numbers from {least:g} to {greatest:g}, and all must be {number:g}")
