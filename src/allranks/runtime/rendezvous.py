"""Rendezvous: each rank publishes its host and GPU; rank 0 checks them all and publishes the result."""

from __future__ import annotations

import json
import os
import socket
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from allranks.errors import DeviceError, RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from allranks.runtime.environment import RankEnvironment

_VERDICT = "verdict"
#: The other ranks wait longer than rank 0 does, so that they learn from it which ranks are missing.
_PATIENCE = timedelta(seconds=10)
#: Ranks that an error names.
_SHOWN = 16


@dataclass(frozen=True)
class RankIdentity:
    """Where a rank is, and the identity of its GPU if it has one."""

    rank: int
    host: str
    gpu: str | None = None


@dataclass(frozen=True)
class HostPlace:
    """Number of ranks on a rank's host, and the host's number in order of lowest rank."""

    local_world_size: int
    node_rank: int


def hosts_store(env: RankEnvironment) -> bool:
    """Return True if this rank serves the store: rank 0 does, unless the agent already serves one there."""
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
    """Wait for all ranks and return this rank's place; an error is raised on all ranks alike."""
    from torch import distributed

    store.set(f"arrived/{arrival.rank}", json.dumps(asdict(arrival)))
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
        arrivals = [RankIdentity(**json.loads(text)) for text in store.multi_get(keys)]
        shared = find_shared_gpu(arrivals)
        if shared is None:
            return json.dumps({"places": {host: asdict(place) for host, place in places(arrivals).items()}})
        error = shared
    kind = "device" if isinstance(error, DeviceError) else "rank"
    return json.dumps({"kind": kind, "what": error.what, "why": error.why, "fix": error.fix})


def _read_verdict(verdict: dict[str, dict[str, dict[str, int]]], arrival: RankIdentity) -> HostPlace:
    if "places" in verdict:
        return HostPlace(**verdict["places"][arrival.host])
    texts = {name: str(text) for name, text in verdict.items()}
    error = DeviceError if texts["kind"] == "device" else RankError
    raise error(texts["what"], why=texts["why"], fix=texts["fix"])


def _seconds(time: timedelta) -> str:
    return f"{time.total_seconds():g} s"


def _listed(ranks: list[int]) -> str:
    """Return ``0, 1 and 5``; of many only the first and how many more."""
    if len(ranks) > _SHOWN:
        return f"{', '.join(map(str, ranks[:_SHOWN]))} and {len(ranks) - _SHOWN} more"
    texts = [str(rank) for rank in ranks]
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
