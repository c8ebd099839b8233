"""Identifies this rank: one small class for each way to start ranks, tried in turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

from allranks.system import schedulers
from allranks.system.rank_environment import EnvironmentKind, RankEnvironment, Variables

__all__ = ["RankEnvironment", "detect", "export"]


class TorchElastic(EnvironmentKind):
    """torchrun, our own agent, and scripts that set the variables by hand.

    Source: the section "Environment Variables" of torch.distributed.run.
    """

    name = "torchrun"
    rank = ("RANK",)
    world_size = ("WORLD_SIZE",)
    local_rank = ("LOCAL_RANK",)
    local_world_size = ("LOCAL_WORLD_SIZE",)
    node_rank = ("GROUP_RANK",)
    restart = ("TORCHELASTIC_RESTART_COUNT",)

    def master(self, env: Variables, several_hosts: bool) -> tuple[str, int]:
        """Return MASTER_ADDR and MASTER_PORT, which are set where RANK is."""
        addr, port = self.get(env, ("MASTER_ADDR",)), self.number(env, ("MASTER_PORT",), least=1)
        if addr is None or port is None:
            raise self.half_set(env, self.rank, self.world_size, ("MASTER_ADDR",), ("MASTER_PORT",))
        return addr, port

    def advice(self, env: Variables, there: list[str], missing: list[str]) -> str:
        """Name the commands that set all of them."""
        return (
            f"set {' and '.join(missing)} too, or start the script with allranks run or torchrun, "
            f"which set all of them; for a single process unset {' and '.join(there)}"
        )


class OpenMpi(EnvironmentKind):
    """Open MPI's mpirun.

    Source: "Environment variables set by mpirun" in Open MPI's manual; seen with 4.1.4. OMPI_COMM_WORLD_NODE_RANK is
    no node rank: it is a rank among those on this host, of all jobs there.
    """

    name = "Open MPI"
    rank = ("OMPI_COMM_WORLD_RANK",)
    world_size = ("OMPI_COMM_WORLD_SIZE",)
    local_rank = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    local_world_size = ("OMPI_COMM_WORLD_LOCAL_SIZE",)

    def job_key(self, env: Variables) -> str:
        """Return the name of the job in PMIx, or in Open MPI's own runtime before that."""
        return self.get(env, ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_SERVER_URI2")) or "openmpi"


class Mpich(EnvironmentKind):
    """MPICH's and Intel MPI's mpiexec (Hydra).

    Source: Hydra's PMI environment (PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS); seen with MPICH 4.0.2.
    PMI_LOCAL_RANK and PMI_LOCAL_SIZE are Cray's spelling.
    """

    name = "MPICH"
    rank = ("PMI_RANK",)
    world_size = ("PMI_SIZE",)
    local_rank = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    local_world_size = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")

    def present(self, env: Variables) -> bool:
        """Return False if a scheduler started the rank by its own PMI, as srun's plugin does: it sets no local rank."""
        if not super().present(env) or self.get(env, self.local_rank):
            return super().present(env)
        return not any(
            scheduler.get(env, scheduler.rank) and self.rank[0].startswith(scheduler.of_a_job)
            for _, scheduler in schedulers.environments()
        )

    def job_key(self, env: Variables) -> str:
        """Return the process id of Hydra's proxy, which started the ranks of this host; Hydra names no job.

        Hydra starts each rank as the leader of a session (seen), so that the leader's parent is the proxy also
        if a shell script stands between rank and proxy. Without /proc it is our own parent.
        """
        try:
            stat = Path(f"/proc/{os.getsid(0)}/stat").read_text()
            starter = int(stat.rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            starter = os.getppid()
        return f"hydra.{starter}"


def detect(variables: Mapping[str, str] | None = None) -> RankEnvironment:
    """Identify this rank.

    RANK and WORLD_SIZE, as torchrun sets them, override the variables of MPI and schedulers, which are then not read:
    the processes of torchrun inherit those of its own task. A process that was not started as a rank, such as one in
    the shell of a batch job, is a world of one.

    Args:
        variables: the environment; default: ``os.environ``.

    Raises:
        RankEnvironmentError: the variables are half set, contradict each other or are not numbers.
    """
    env = os.environ if variables is None else variables
    explicit = TorchElastic()
    if explicit.get(env, explicit.rank):
        return explicit.read(env)
    # An mpirun inside a Slurm job starts its daemons through srun, so that its ranks carry the daemon's SLURM_PROCID:
    # MPI's variables come first, except where Mpich leaves a rank to a scheduler.
    kinds = chain((OpenMpi(), Mpich()), (environment for _, environment in schedulers.environments()))
    found = next((kind.read(env) for kind in kinds if kind.present(env)), None)
    world_size = explicit.get(env, explicit.world_size)
    # Many batch scripts export a lone WORLD_SIZE that repeats the scheduler's number.
    if world_size and not (found and world_size == str(found.world_size)):
        return explicit.read(env)
    return found or RankEnvironment("single process")


def export(rank: RankEnvironment, local_world_size: int) -> Callable[[], None]:
    """Set torchrun's variables, so that Lightning, Accelerate and ``env://`` see the same ranks.

    In a world of one without a port, MASTER_ADDR and MASTER_PORT stay unchanged: child processes would inherit a port
    of 0, which is invalid there.

    Returns:
        A function to call at the close. In a world of one it restores the variables, except those changed since:
        Accelerate, if used later, takes a lone LOCAL_RANK to mean that there are other ranks.
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

    def restore() -> None:
        for name, value in before.items():
            if os.environ.get(name) == values[name]:
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value

    return restore
