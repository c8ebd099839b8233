"""``allranks.init()``: from the environment variables of a rank to a working process group."""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from allranks import contract
from allranks.errors import RankError, unknown
from allranks.runtime import device as devices
from allranks.runtime import environment, stop
from allranks.runtime.call_errors import answering, is_whole
from allranks.runtime.context import Context
from allranks.runtime.peers import Peers
from allranks.runtime.progress import connect_counter
from allranks.runtime.rendezvous import join
from allranks.runtime.seed import make_deterministic, seed_all
from allranks.system.processes import let_gloo_rest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allranks.runtime.trackers import Tracker

_PRECISIONS = ("fp32", "bf16", "fp16")
#: Ids of processes with an open context; a forked child has none.
_open: set[int] = set()


@answering
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
    if not is_whole(log_every, 0):
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
        connect_counter()
        place, membership = join(rank, chosen, rank_device, limit, undo.close)
        atexit.unregister(let_gloo_rest)  # An earlier init, or the agent, may have registered it.
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
    """Return the timeout as a timedelta; raise a RankError if it is invalid."""
    with suppress(TypeError, ValueError, OverflowError):
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if limit > timedelta(0):
            return limit
    raise RankError(
        f"invalid timeout: {timeout!r}",
        why="ranks wait so many seconds for each other; expected a number above 0, or a datetime.timedelta",
        fix="timeout=600, the default, or more",
    )
