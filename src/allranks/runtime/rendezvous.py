"""Rendezvous of the ranks, their process group, and how a rank leaves it.

Each rank publishes its host and GPU in the store; rank 0 checks them all and publishes the result.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import socket
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from allranks.errors import DeviceError, RankError
from allranks.runtime import device as devices
from allranks.runtime.peers import ALL_LEFT
from allranks.system.processes import let_gloo_rest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch._C._distributed_c10d import Store

    from allranks.runtime.environment import RankEnvironment

#: The stores of this process. A second init() after a close() reuses one, under another prefix.
_stores: dict[tuple[int, str, int], Store] = {}
_generation = itertools.count()
_VERDICT = "verdict"
#: The other ranks wait this much longer than rank 0, which reports the missing ranks.
_PATIENCE = timedelta(seconds=10)
#: Rank 0 serves the store and leaves last, but waits at most this long for the others.
_LAST_LEAVE = timedelta(seconds=60)
#: Most ranks that an error names.
_SHOWN = 16


class RankIdentity(NamedTuple):
    """Host of a rank, and the identity of its GPU or None."""

    rank: int
    host: str
    gpu: str | None = None


class HostPlace(NamedTuple):
    """Number of ranks on a host, and the host's number in the order of lowest ranks."""

    local_world_size: int
    node_rank: int


@dataclass(frozen=True)
class Membership:
    """The store of the process group; whether this rank serves it; whether allranks created the group.

    ``on_close`` is called once, when the context has been closed.
    """

    store: Store
    serves: bool
    ours: bool
    on_close: Callable[[], None]

    def leave(self, world_size: int) -> None:
        """Leave the process group and then the store, which the rank that serves it leaves last."""
        from torch import distributed

        # A DistributedDataParallel model outlives the group and destroys it while holding the GIL: torch 2.13 hangs if
        # a gloo thread waits for the GIL then. The same is true of the script's own process group.
        let_gloo_rest()
        if self.ours and distributed.is_initialized():
            distributed.destroy_process_group()
        # If the store is gone, the rank that served it has failed, and the user should see that rank's error.
        with suppress(distributed.DistError):
            if self.store.add("left", 1) == world_size:
                self.store.set(ALL_LEFT, "1")
            elif self.serves:
                self.store.wait([ALL_LEFT], _LAST_LEAVE)

    def abandon(self, backend: str) -> None:
        """Leave without waiting for pending operations, which never complete if the other ranks wait for this one."""
        from torch import distributed

        if not distributed.is_initialized():
            return
        # NCCL can abort. Gloo cannot (seen with torch 2.13: abort, destroy and the destructor all wait for the peer),
        # so the group stays until the process exits.
        abort = getattr(distributed.distributed_c10d, "_abort_process_group", None)
        if "nccl" in backend and abort is not None:
            abort()
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(distributed.group.WORLD))


def join(
    rank: RankEnvironment, backend: str, device: torch.device, timeout: timedelta, on_close: Callable[[], None]
) -> tuple[HostPlace, Membership]:
    """Wait for the other ranks and create the process group, or use the one that the script has created."""
    from torch import distributed
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    if distributed.is_initialized():
        group = (distributed.get_rank(), distributed.get_world_size())
        if group != (rank.rank, rank.world_size):
            raise RankError(
                f"the script's own process group is rank {group[0]} of {group[1]}, "
                f"but {rank.kind} says rank {rank.rank} of {rank.world_size}",
                why="allranks.init() uses a process group that is there already, and these two do not agree",
                fix="call allranks.init() instead of torch.distributed.init_process_group()",
            )
        theirs = distributed.distributed_c10d._get_default_store()
        store = PrefixStore(f"allranks/adopted/{next(_generation)}", theirs)
        place = HostPlace(rank.local_world_size or rank.world_size, rank.node_rank or 0)
        return place, Membership(store, serves=False, ours=False, on_close=on_close)
    where = (os.getpid(), rank.master_addr, rank.master_port)
    if where not in _stores:
        _stores[where] = open_store(rank, timeout)
    store = PrefixStore(f"allranks/{rank.restart}/{next(_generation)}", _stores[where])
    arrival = RankIdentity(rank.rank, socket.gethostname(), devices.gpu_identity(device))
    met = meet(store, arrival, rank.world_size, timeout)
    # Older versions of torch accept a device with NCCL only, and then create the communicator at once.
    bound: dict[str, Any] = {"device_id": device} if "nccl" in backend else {}
    distributed.init_process_group(
        backend, store=store, rank=rank.rank, world_size=rank.world_size, timeout=timeout, **bound
    )
    serves = rank.world_size > 1 and hosts_store(rank)
    # The launcher's variables override what the ranks have counted.
    place = HostPlace(
        rank.local_world_size or met.local_world_size, met.node_rank if rank.node_rank is None else rank.node_rank
    )
    return place, Membership(store, serves, ours=True, on_close=on_close)


def hosts_store(env: RankEnvironment) -> bool:
    """Return True if this rank serves the store: rank 0, unless the agent already serves one."""
    return env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_store(env: RankEnvironment, timeout: timedelta) -> Store:
    """Open the store that the ranks of this world share."""
    from torch.distributed import DistError, HashStore, TCPStore  # type: ignore[attr-defined]

    if env.world_size == 1:
        return HashStore()
    serves = hosts_store(env)
    try:
        return TCPStore(env.master_addr, env.master_port, is_master=serves, timeout=timeout, wait_for_workers=False)
    except DistError as error:
        here, where = socket.gethostname(), f"{env.master_addr}:{env.master_port}"
        why = str(error).strip().split("\n")[0]
        if serves:
            raise RankError(
                f"rank 0 on {here} cannot listen at {where}",
                why=why,
                fix="set MASTER_PORT to a free port, and MASTER_ADDR to this host, on all ranks",
            ) from error
        raise RankError(
            f"rank {env.rank} on {here} cannot reach rank 0 at {where} within {_seconds(timeout)}",
            why=why,
            fix="read the log of rank 0; check that MASTER_ADDR is its host as seen from here, and that no "
            "firewall is between",
        ) from error


def meet(store: Store, arrival: RankIdentity, world_size: int, timeout: timedelta) -> HostPlace:
    """Wait for all ranks and return this rank's place; errors are raised on all ranks."""
    from torch import distributed

    store.set(f"arrived/{arrival.rank}", json.dumps(arrival))
    if arrival.rank == 0:
        store.set(_VERDICT, _judge(store, world_size, timeout))
    try:
        store.wait([_VERDICT], timeout + _PATIENCE)
    except distributed.DistError as error:
        raise RankError(
            f"rank {arrival.rank} got no answer from rank 0 within {_seconds(timeout + _PATIENCE)}",
            why="rank 0 ended or hangs before allranks.init()",
            fix="read the log of rank 0: allranks logs --rank 0",
        ) from error
    return _read_verdict(json.loads(store.get(_VERDICT)), arrival)


def find_shared_gpu(arrivals: Iterable[RankIdentity]) -> DeviceError | None:
    """Return an error if ranks are bound to the same GPU; ranks on the CPU share nothing."""
    ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for arrival in arrivals:
        if arrival.gpu is not None:
            ranks[arrival.host, arrival.gpu].append(arrival.rank)
    for (host, gpu), sharing in ranks.items():
        if len(sharing) > 1:
            return DeviceError(
                f"ranks {_listed(sharing)} on {host} are bound to the same GPU, {gpu}",
                why="each rank takes the GPU numbered by its LOCAL_RANK among those it sees",
                fix="give each rank of a host its own LOCAL_RANK, as allranks run and torchrun do; let all "
                "of them see all GPUs; start no more ranks per node than it has GPUs",
            )
    return None


def places(arrivals: Iterable[RankIdentity]) -> dict[str, HostPlace]:
    """Count the ranks of each host, and number the hosts by their lowest rank."""
    counts: dict[str, int] = {}
    for arrival in sorted(arrivals, key=lambda arrival: arrival.rank):
        counts[arrival.host] = counts.get(arrival.host, 0) + 1
    return {host: HostPlace(count, node) for node, (host, count) in enumerate(counts.items())}


def _judge(store: Store, world_size: int, timeout: timedelta) -> str:
    """Wait for the other ranks on rank 0; return their places, or the error that all raise, as JSON."""
    from torch import distributed

    keys = [f"arrived/{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, timeout)
    except distributed.DistError:
        ranks = [rank for rank, key in enumerate(keys) if not store.check([key])]
        who, why = ("rank", "it ended before, hangs,") if len(ranks) == 1 else ("ranks", "they ended before, hang,")
        error = RankError(
            f"{who} {_listed(ranks)} did not reach allranks.init() within {_seconds(timeout)}",
            why=f"{why} or cannot reach the master node",
            fix=f"read the log: allranks logs --rank {ranks[0] if ranks else 0}; "
            "if it is only slow, give init() a longer timeout",
        )
    else:
        arrivals = [RankIdentity(*json.loads(text)) for text in store.multi_get(keys)]
        shared = find_shared_gpu(arrivals)
        if shared is None:
            return json.dumps({"places": places(arrivals)})
        error = shared
    return json.dumps({"is_device": isinstance(error, DeviceError), "error": vars(error)})


def _read_verdict(verdict: dict[str, Any], arrival: RankIdentity) -> HostPlace:
    if "places" in verdict:
        return HostPlace(*verdict["places"][arrival.host])
    raise (DeviceError if verdict["is_device"] else RankError)(**verdict["error"])


def _seconds(time: timedelta) -> str:
    return f"{time.total_seconds():g} s"


def _listed(ranks: list[int]) -> str:
    """Return ``0, 1 and 5``; of many ranks the first ones and the number of others."""
    texts = [str(rank) for rank in ranks[:_SHOWN]]
    if len(ranks) > _SHOWN:
        texts.append(f"{len(ranks) - _SHOWN} more")
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
