"""Who this rank is: one small file for each way to start ranks, asked in turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial

from allranks.runtime.environment.base import EnvironmentKind, RankEnvironment
from allranks.runtime.environment.mpich import Mpich
from allranks.runtime.environment.openmpi import OpenMpi
from allranks.runtime.environment.pbs import Pbs
from allranks.runtime.environment.slurm import Slurm
from allranks.runtime.environment.torchelastic import TorchElastic

__all__ = ["RankEnvironment", "detect", "export"]

#: Asked in this order. An mpirun inside a Slurm job starts its daemons through srun, so that its ranks carry
#: the daemon's SLURM_PROCID: MPI's own word comes first. srun's PMI plugins set PMI_RANK too, but no
#: MPI_LOCALRANKID, and Slurm knows more there: ``Mpich`` leaves those ranks to ``Slurm``.
KINDS: tuple[EnvironmentKind, ...] = (OpenMpi(), Mpich(), Slurm(), Pbs())


def detect(variables: Mapping[str, str] | None = None) -> RankEnvironment:
    """Find out who this rank is.

    RANK and WORLD_SIZE, as torchrun sets them, win over the variables of MPI and of schedulers, which are then
    not even read: what torchrun starts inherits those of the task that it was started in. A process that
    nothing started as a rank, such as one in the shell of a batch job, is a world of one.

    Args:
        variables: the environment; ``os.environ`` if it is left out.

    Raises:
        RankEnvironmentError: the variables are half set, contradict each other or are no numbers.
    """
    env = os.environ if variables is None else variables
    explicit = TorchElastic()
    if explicit.get(env, explicit.rank):
        return explicit.read(env)
    found = next((kind.read(env) for kind in KINDS if kind.present(env)), None)
    world_size = explicit.get(env, explicit.world_size)
    # A lone WORLD_SIZE that repeats what the scheduler says is one that many batch scripts export.
    if world_size and not (found and world_size == str(found.world_size)):
        return explicit.read(env)
    return found or RankEnvironment("single process")


def export(rank: RankEnvironment, local_world_size: int) -> Callable[[], None]:
    """Set torchrun's variables, so that Lightning, Accelerate and ``env://`` agree with us.

    A world of one that was given no port meets nobody: MASTER_ADDR and MASTER_PORT stay as they are. A port of
    0 would also reach the commands that the script starts, where it is no port.

    Returns:
        What to call at the close. In a world of one it puts the variables back, except those that somebody has
        set since: Accelerate, used after that, takes LOCAL_RANK alone to mean that there are others to meet.
    """
    values = {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.local_rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
    }
    if rank.master_port:
        values |= {"MASTER_ADDR": rank.master_addr, "MASTER_PORT": str(rank.master_port)}
    before = {name: os.environ.get(name) for name in values if rank.world_size == 1}
    os.environ.update(values)
    return partial(_put_back, values, before)


def _put_back(values: Mapping[str, str], before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if os.environ.get(name) != values[name]:
            continue
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
