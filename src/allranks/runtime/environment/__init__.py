"""Who this rank is: one small file for each way to start ranks, asked in turn."""

from __future__ import annotations

import os
from collections.abc import Mapping

from allranks.runtime.environment.base import Launcher, RankEnvironment
from allranks.runtime.environment.mpich import Mpich
from allranks.runtime.environment.openmpi import OpenMpi
from allranks.runtime.environment.pbs import Pbs
from allranks.runtime.environment.slurm import Slurm
from allranks.runtime.environment.torchelastic import TorchElastic

__all__ = ["RankEnvironment", "detect", "export"]

#: Asked in this order. An mpirun inside a Slurm job starts its daemons through srun, so that its ranks carry
#: the daemon's SLURM_PROCID: MPI's own word comes first. srun's PMI plugins set PMI_RANK too, but no
#: MPI_LOCALRANKID, and Slurm knows more there: ``Mpich`` leaves those ranks to ``Slurm``.
SCHEDULERS: tuple[Launcher, ...] = (OpenMpi(), Mpich(), Slurm(), Pbs())


def detect(variables: Mapping[str, str] | None = None) -> RankEnvironment:
    """Find out who this rank is.

    RANK and WORLD_SIZE, as torchrun sets them, win over the variables of MPI and of schedulers. A process
    that nothing started as a rank, such as one in the shell of a batch job, is a world of one.

    Args:
        variables: the environment; ``os.environ`` if it is left out.

    Raises:
        RankEnvironmentError: the variables are half set, contradict each other or are no numbers.
    """
    env = os.environ if variables is None else variables
    found = next((launcher.read(env) for launcher in SCHEDULERS if launcher.present(env)), None)
    explicit = TorchElastic()
    if not explicit.present(env):
        return found or RankEnvironment("single process")
    if found and not explicit.get(env, explicit.rank) and _agrees(env, found):
        return found
    return explicit.read(env)


def _agrees(env: Mapping[str, str], found: RankEnvironment) -> bool:
    """Tell whether a lone WORLD_SIZE repeats what the scheduler says, as many batch scripts export it."""
    return env["WORLD_SIZE"].strip() == str(found.world_size)


def export(rank: RankEnvironment, local_world_size: int) -> None:
    """Set torchrun's variables, so that Lightning, Accelerate and ``env://`` agree with us."""
    os.environ.update(
        RANK=str(rank.rank),
        LOCAL_RANK=str(rank.local_rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_WORLD_SIZE=str(local_world_size),
        MASTER_ADDR=rank.master_addr,
        MASTER_PORT=str(rank.master_port),
    )
