"""``allranks.init()``: from the variables that a rank finds to a process group that works."""

from __future__ import annotations

import atexit
import itertools
import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from allranks.errors import RankError, unknown
from allranks.processes import let_gloo_rest
from allranks.runtime import device as devices
from allranks.runtime import environment, rendezvous, stop
from allranks.runtime.context import Context
from allranks.runtime.deterministic import make_deterministic
from allranks.runtime.membership import Membership
from allranks.runtime.peer import Peers
from allranks.runtime.rendezvous import Arrival, Place
from allranks.runtime.seed import seed_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch._C._distributed_c10d import Store

    from allranks.runtime.environment import RankEnvironment
    from allranks.runtime.trackers import Tracker

_PRECISIONS = ("fp32", "bf16", "fp16")
#: What to call when the open context closes, by process id: a forked child has none open.
_open: dict[int, list[Callable[[], None]]] = {}
#: The stores of this process, which a second init() after a close() uses again, under another prefix.
_stores: dict[tuple[int, str, int], Store] = {}
_generation = itertools.count()


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
    _check(precision, log_every, trackers)
    limit = _limit(timeout)
    if os.getpid() in _open:
        raise RankError(
            "allranks.init() was called a second time",
            why="this process has a context already",
            fix="hand the first context to the code that needs it, or close() it before",
        )
    rank = environment.detect()
    chosen, rank_device = devices.choose(backend or _started_backend(), device, rank)
    devices.bind(rank_device, rank)
    stop.note_warnings()
    try:
        place, membership = _join(rank, chosen, rank_device, limit)
        atexit.unregister(let_gloo_rest)  # Once is enough: after another init, and for what the agent has done.
        atexit.register(let_gloo_rest)
    except BaseException:
        stop.close()
        raise
    context = Context(
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
    undo = [environment.export(rank, place.local_world_size)]
    _open[os.getpid()] = undo
    if deterministic:
        undo.append(make_deterministic(tell=rank.rank == 0, seeded=seed is not None))
    try:
        Peers(rank.rank, rank.world_size, membership.store).announce()
        context._start_trackers()
    except BaseException:
        context.abandon()
        raise
    return context


def _check(precision: str, log_every: int, trackers: Sequence[str | Tracker]) -> None:
    """Check what the user asked for.

    Raises:
        RankError: an argument is invalid.
    """
    if precision not in _PRECISIONS:
        raise unknown("precision", precision, _PRECISIONS)
    if isinstance(log_every, bool) or not isinstance(log_every, int) or log_every < 0:
        raise RankError(
            f"log_every={log_every!r} cannot be", why="it is a number of optimizer steps", fix="1 or more; 0 for never"
        )
    if isinstance(trackers, str):
        raise RankError(
            f"trackers={trackers!r} is a text", why="it is a sequence of trackers", fix=f'trackers=["{trackers}"]'
        )


def _limit(timeout: float | timedelta) -> timedelta:
    """Return how long ranks wait for each other.

    Raises:
        RankError: that is no time, or none at all.
    """
    with suppress(TypeError, ValueError, OverflowError):
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if limit > timedelta(0):
            return limit
    raise RankError(
        f"invalid timeout: {timeout!r}",
        why="ranks wait so many seconds for each other; expected a number above 0, or a datetime.timedelta",
        fix="timeout=600, the default, or more",
    )


def _join(rank: RankEnvironment, backend: str, device: torch.device, timeout: timedelta) -> tuple[Place, Membership]:
    """Meet the other ranks and start the process group, or take the one that is there."""
    from torch import distributed
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    if distributed.is_initialized():
        return _adopt(rank), Membership(_default_store(), serves=False, ours=False, on_close=_forget)
    store = PrefixStore(f"allranks/{rank.restart}/{next(_generation)}", _store(rank, timeout))
    arrival = Arrival(rank.rank, socket.gethostname(), devices.gpu_identity(device))
    met = rendezvous.meet(store, arrival, rank.world_size, timeout)
    # Older versions of torch take a device here with NCCL only, where it makes the communicator at once.
    bound: dict[str, Any] = {"device_id": device} if "nccl" in backend else {}
    distributed.init_process_group(
        backend, store=store, rank=rank.rank, world_size=rank.world_size, timeout=timeout, **bound
    )
    serves = rank.world_size > 1 and rendezvous.hosts_store(rank)
    return _place(rank, met), Membership(store, serves, ours=True, on_close=_forget)


def _default_store() -> Store | None:
    """Give the store of the group that the script has started, for keys of ours; None where torch hides it."""
    from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

    get = getattr(distributed_c10d, "_get_default_store", None)
    return PrefixStore(f"allranks/adopted/{next(_generation)}", get()) if get is not None else None


def _store(rank: RankEnvironment, timeout: timedelta) -> Store:
    key = (os.getpid(), rank.master_addr, rank.master_port)
    if key not in _stores:
        _stores[key] = rendezvous.open_store(rank, timeout)
    return _stores[key]


def _place(rank: RankEnvironment, met: Place) -> Place:
    """Take the word on hosts of what started the ranks, where it says something, else what the ranks counted."""
    return Place(
        rank.local_world_size or met.local_world_size,
        met.node_rank if rank.node_rank is None else rank.node_rank,
    )


def _adopt(rank: RankEnvironment) -> Place:
    """Check that the script's own process group is the one that the environment speaks of.

    Raises:
        RankError: it is not.
    """
    from torch import distributed

    group = (distributed.get_rank(), distributed.get_world_size())
    if group != (rank.rank, rank.world_size):
        raise RankError(
            f"the script's own process group is rank {group[0]} of {group[1]}, "
            f"but {rank.kind} says rank {rank.rank} of {rank.world_size}",
            why="allranks.init() uses a process group that is there already, and these two do not agree",
            fix="call allranks.init() instead of torch.distributed.init_process_group()",
        )
    return Place(rank.local_world_size or rank.world_size, rank.node_rank or 0)


def _started_backend() -> str | None:
    """Give the backend of the process group that the script has started itself, if it has."""
    from torch import distributed

    return str(distributed.get_backend()) if distributed.is_initialized() else None


def _forget() -> None:
    stop.close()
    closing = _open.pop(os.getpid(), [])
    while closing:
        closing.pop()()
