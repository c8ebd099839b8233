"""``allranks.init()``: from the variables that a rank finds to a process group that works.

Rendezvous: each rank publishes its host and GPU in the store; rank 0 checks them all and publishes the result.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import socket
from collections import defaultdict
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from allranks import contract
from allranks.errors import DeviceError, RankError, unknown
from allranks.runtime import advance, environment, stop
from allranks.runtime import device as devices
from allranks.runtime.context import Context, Membership
from allranks.runtime.peers import Peers
from allranks.runtime.seed import make_deterministic, seed_all
from allranks.system.processes import let_gloo_rest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch._C._distributed_c10d import Store

    from allranks.runtime.environment import RankEnvironment
    from allranks.runtime.trackers import Tracker

_PRECISIONS = ("fp32", "bf16", "fp16")
#: The processes that have an open context: a forked child has none.
_open: set[int] = set()
#: The stores of this process, which a second init() after a close() uses again, under another prefix.
_stores: dict[tuple[int, str, int], Store] = {}
_generation = itertools.count()
_VERDICT = "verdict"
#: The other ranks wait longer than rank 0 does, so that they learn from it which ranks are missing.
_PATIENCE = timedelta(seconds=10)
#: Ranks that an error names.
_SHOWN = 16


class RankIdentity(NamedTuple):
    """Where a rank is, and the identity of its GPU if it has one."""

    rank: int
    host: str
    gpu: str | None = None


class HostPlace(NamedTuple):
    """Number of ranks on a rank's host, and the host's number in order of lowest rank."""

    local_world_size: int
    node_rank: int


def init(
    backend: str | None = None,
    *,
    seed: int | None = 0,
    device: str | None = None,
    timeout: float | timedelta = 600.0,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    deterministic: bool = False,
    log_every: int = 50,
    trackers: Sequence[str | Tracker] = (),
) -> Context:
    """Identify this rank, bind its device, seed the random generators and start the process group.

    It works the same under ``allranks run``, torchrun, srun, mpirun, pbsdsh, and for a script started alone,
    which is a world of one rank. It sets RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE for code that reads them,
    and MASTER_ADDR and MASTER_PORT if there are several ranks; a world of one removes them when it is closed. If the
    script has already started a process group, ``init`` uses that group.

    From here on SIGUSR1 and SIGUSR2, which schedulers send before the time limit, no longer kill the process, unless
    the script handles them itself; ``ctx.checkpoints`` handles those that came before it was called.

    Args:
        backend: backend of the process group. Default: ALLRANKS_BACKEND, else nccl if there are GPUs, else gloo.
        seed: seeds Python, NumPy and torch, together with the rank: the same in each run, and different on each rank.
            None leaves the generators alone.
        device: ``"cpu"``, ``"cuda"`` (the one numbered by the local rank) or ``"cuda:1"``. Default: a GPU
            with nccl, the CPU with gloo.
        timeout: seconds that ranks wait for each other, here and in each collective operation.
        precision: precision of the operations under ``ctx.autocast()``: bf16 and fp16 are mixed precision as defined
            by torch's autocast; fp16 also scales the gradients.
        deterministic: use deterministic algorithms only, until the context is closed. Rank 0 reports on stderr what
            that does not guarantee.
        log_every: number of optimizer steps between two records of ``ctx.metrics``; 0 writes only those that the
            script records itself.
        trackers: where rank 0 writes metrics beside ``metrics.jsonl``: ``"tensorboard"``, ``"wandb"``,
            ``"mlflow"``, or objects with methods ``write(step, values)`` and ``close()``.

    Raises:
        RankEnvironmentError: the environment variables that identify a rank are incomplete or contradict each other.
        DeviceError: this rank's GPU does not exist, or two ranks have the same one.
        RankError: an argument is invalid; ranks are missing after ``timeout``; an earlier context is still open; or a
            tracker cannot start, for example because its package is missing.
    """
    if precision not in _PRECISIONS:
        raise unknown("precision", precision, _PRECISIONS)
    if isinstance(log_every, bool) or not isinstance(log_every, int) or log_every < 0:
        raise RankError(
            f"log_every={log_every!r} cannot be", why="it is a number of optimizer steps", fix="1 or more; 0 for never"
        )
    if isinstance(trackers, str):
        raise RankError(
            f"trackers={trackers!r} is a string", why="it is a sequence of trackers", fix=f'trackers=["{trackers}"]'
        )
    limit = _limit(timeout)
    if os.getpid() in _open:
        raise RankError(
            "allranks.init() was called a second time",
            why="this process has a context already",
            fix="hand the first context to the code that needs it, or close() it before",
        )
    from torch import distributed

    make: type[Context] = Context
    if contract.ESTIMATE in os.environ:  # One step of one rank, on the CPU.
        from allranks.runtime.estimate import MeasuredContext

        make, backend, device, trackers = MeasuredContext, "gloo", "cpu", ()
    rank = environment.detect()
    started = str(distributed.get_backend()) if distributed.is_initialized() else None
    chosen, rank_device = devices.choose(backend or started, device, rank)
    devices.bind(rank_device, rank)
    undo = ExitStack()
    undo.callback(stop.close)
    try:
        stop.note_warnings()
        advance.connect()
        place, membership = _join(rank, chosen, rank_device, limit, undo.close)
        atexit.unregister(let_gloo_rest)  # Once is enough: after another init, and for what the agent has done.
        atexit.register(let_gloo_rest)
    except BaseException:
        undo.close()
        raise
    context = make(
        rank=rank.rank,
        local_rank=rank.local_rank,
        world_size=rank.world_size,
        local_world_size=place.local_world_size,
        node_rank=place.node_rank,
        device=rank_device,
        backend=chosen,
        environment=rank.kind,
        master_addr=rank.master_addr,
        restart=rank.restart,
        seed=seed,
        rank_seed=None if seed is None else seed_all(seed, rank.rank),
        timeout=limit,
        precision=precision,
        deterministic=deterministic,
        log_every=log_every,
        trackers=tuple(trackers),
        _membership=membership,
    )
    undo.callback(environment.export(rank, place.local_world_size))
    _open.add(os.getpid())
    undo.callback(_open.discard, os.getpid())
    if deterministic:
        undo.callback(make_deterministic(report=rank.rank == 0, seeded=seed is not None))
    try:
        context.progress.clock.connect(rank.restart)
        Peers(rank.rank, rank.world_size, membership.store).announce()
        context._start_trackers()
    except BaseException:
        context.abandon()
        raise
    return context


def _limit(timeout: float | timedelta) -> timedelta:
    """Return how long ranks wait for each other."""
    with suppress(TypeError, ValueError, OverflowError):
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if limit > timedelta(0):
            return limit
    raise RankError(
        f"invalid timeout: {timeout!r}",
        why="ranks wait so many seconds for each other; expected a number above 0, or a datetime.timedelta",
        fix="timeout=600, the default, or more",
    )


def _join(
    rank: RankEnvironment, backend: str, device: torch.device, timeout: timedelta, on_close: Callable[[], None]
) -> tuple[HostPlace, Membership]:
    """Meet the other ranks and start the process group, or use the one that the script has started."""
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
    # Older versions of torch take a device here with NCCL only, where it makes the communicator at once.
    bound: dict[str, Any] = {"device_id": device} if "nccl" in backend else {}
    distributed.init_process_group(
        backend, store=store, rank=rank.rank, world_size=rank.world_size, timeout=timeout, **bound
    )
    serves = rank.world_size > 1 and hosts_store(rank)
    # The launcher may know more about hosts than the ranks have counted.
    place = HostPlace(
        rank.local_world_size or met.local_world_size,
        met.node_rank if rank.node_rank is None else rank.node_rank,
    )
    return place, Membership(store, serves, ours=True, on_close=on_close)


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
    """Return ``0, 1 and 5``; of many only the first and how many more."""
    texts = [str(rank) for rank in ranks[:_SHOWN]]
    if len(ranks) > _SHOWN:
        texts.append(f"{len(ranks) - _SHOWN} more")
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
