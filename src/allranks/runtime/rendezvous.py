"""The ranks meet: each says where it is, rank 0 looks at all of them and tells everybody what it found."""

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
#: The other ranks wait longer than rank 0 does, so that they hear from it who is missing.
_PATIENCE = timedelta(seconds=10)


@dataclass(frozen=True)
class Arrival:
    """Where a rank is, and the identity of its GPU if it has one."""

    rank: int
    host: str
    gpu: str | None = None


@dataclass(frozen=True)
class Place:
    """What a rank learns: how many ranks are on its host, and the host's number in order of lowest rank."""

    local_world_size: int
    node_rank: int


def hosts_store(env: RankEnvironment) -> bool:
    """Tell whether this rank serves the store: rank 0 does, unless the agent already serves one there."""
    return env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_store(env: RankEnvironment, timeout: timedelta) -> Store:
    """Open the store that the ranks of this world share.

    Raises:
        RankError: nobody listens there within ``timeout``, or rank 0 cannot listen there.
    """
    from torch.distributed import DistError, HashStore, TCPStore  # type: ignore[attr-defined]

    if env.world_size == 1:
        return HashStore()
    serves = hosts_store(env)
    try:
        return TCPStore(env.master_addr, env.master_port, is_master=serves, timeout=timeout, wait_for_workers=False)
    except DistError as error:
        where = f"{env.master_addr}:{env.master_port}"
        if serves:
            raise _cannot_listen(where, error) from error
        raise _no_master(env.rank, where, timeout, error) from error


def meet(store: Store, arrival: Arrival, world_size: int, timeout: timedelta) -> Place:
    """Wait for all ranks and learn where each is.

    Raises:
        DeviceError: two ranks have the same GPU; on all ranks alike.
        RankError: ranks are missing after ``timeout``; it names them.
    """
    from torch import distributed

    store.set(_key(arrival.rank), json.dumps(asdict(arrival)))
    if arrival.rank == 0:
        store.set(_VERDICT, _judge(store, world_size, timeout))
    try:
        store.wait([_VERDICT], timeout + _PATIENCE)
    except distributed.DistError as error:
        raise RankError(
            f"rank {arrival.rank} heard nothing from rank 0 for {_seconds(timeout + _PATIENCE)}",
            why="rank 0 ended or hangs before allranks.init()",
            fix="look at the log of rank 0: allranks logs --rank 0",
        ) from error
    return _read_verdict(json.loads(store.get(_VERDICT)), arrival)


def find_shared_gpu(arrivals: Iterable[Arrival]) -> DeviceError | None:
    """Look for ranks that are bound to the same GPU; ranks on the CPU share nothing."""
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


def places(arrivals: Iterable[Arrival]) -> dict[str, Place]:
    """Count the ranks of each host, and number the hosts by their lowest rank."""
    counts: dict[str, int] = {}
    for arrival in sorted(arrivals, key=lambda arrival: arrival.rank):
        counts[arrival.host] = counts.get(arrival.host, 0) + 1
    return {host: Place(count, node) for node, (host, count) in enumerate(counts.items())}


def _judge(store: Store, world_size: int, timeout: timedelta) -> str:
    """On rank 0: wait for the others and write down what to tell them, in JSON."""
    from torch import distributed

    keys = [_key(rank) for rank in range(world_size)]
    try:
        store.wait(keys, timeout)
    except distributed.DistError:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return _write_error(_missing(absent, timeout))
    arrivals = [Arrival(**json.loads(text)) for text in store.multi_get(keys)]
    error = find_shared_gpu(arrivals)
    if error:
        return _write_error(error)
    return json.dumps({"places": {host: asdict(place) for host, place in places(arrivals).items()}})


def _write_error(error: RankError) -> str:
    kind = "device" if isinstance(error, DeviceError) else "rank"
    return json.dumps({"kind": kind, "what": error.what, "why": error.why, "fix": error.fix})


def _read_verdict(verdict: dict[str, dict[str, dict[str, int]]], arrival: Arrival) -> Place:
    if "places" in verdict:
        return Place(**verdict["places"][arrival.host])
    texts = {name: str(text) for name, text in verdict.items()}
    error = DeviceError if texts["kind"] == "device" else RankError
    raise error(texts["what"], why=texts["why"], fix=texts["fix"])


def _missing(ranks: list[int], timeout: timedelta) -> RankError:
    who, why = ("rank", "it ended before, hangs,") if len(ranks) == 1 else ("ranks", "they ended before, hang,")
    return RankError(
        f"{who} {_listed(ranks)} did not reach allranks.init() within {_seconds(timeout)}",
        why=f"{why} or cannot reach the master node",
        fix=f"look at the log: allranks logs --rank {ranks[0] if ranks else 0}; "
        "if it is only slow, give init() a longer timeout",
    )


def _no_master(rank: int, where: str, timeout: timedelta, error: Exception) -> RankError:
    return RankError(
        f"rank {rank} on {socket.gethostname()} cannot reach rank 0 at {where} within {_seconds(timeout)}",
        why=_first_line(error),
        fix="look at the log of rank 0; check that MASTER_ADDR is its host as seen from here, and that no "
        "firewall is between",
    )


def _cannot_listen(where: str, error: Exception) -> RankError:
    return RankError(
        f"rank 0 on {socket.gethostname()} cannot listen at {where}",
        why=_first_line(error),
        fix="set MASTER_PORT to a free port, and MASTER_ADDR to this host, on all ranks",
    )


def _key(rank: int) -> str:
    return f"arrived/{rank}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _seconds(time: timedelta) -> str:
    return f"{time.total_seconds():g} s"


def _listed(ranks: list[int], most: int = 16) -> str:
    """Write ``0, 1 and 5``; of many only the first and how many more."""
    if len(ranks) > most:
        return f"{', '.join(map(str, ranks[:most]))} and {len(ranks) - most} more"
    texts = [str(rank) for rank in ranks]
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
