"""MPICH's and Intel MPI's mpiexec (Hydra).

Source: Hydra's PMI environment (PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS); seen with MPICH 4.0.2.
"""

from __future__ import annotations

import os
from pathlib import Path

from allranks.runtime.environment.base import EnvironmentKind, Variables


class Mpich(EnvironmentKind):
    """PMI_RANK and its companions. PMI_LOCAL_RANK and PMI_LOCAL_SIZE are Cray's spelling."""

    name = "MPICH"
    rank = ("PMI_RANK",)
    world_size = ("PMI_SIZE",)
    local_rank = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    local_world_size = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")

    def present(self, env: Variables) -> bool:
        """Leave to Slurm what srun started with its PMI plugin."""
        by_srun = self.get(env, ("SLURM_PROCID",)) and not self.get(env, self.local_rank)
        return super().present(env) and not by_srun

    def find_node_rank(self, env: Variables) -> int | None:
        """Say 0 where all ranks are on this host; Hydra does not tell otherwise."""
        return 0 if self.find_local_world_size(env) == self.find_world_size(env) else None

    def job_key(self, env: Variables) -> str:
        """Give the process that started the ranks of this host; Hydra tells no name of the job."""
        return f"hydra.{_starter()}"


def _starter() -> int:
    """Find the process id of Hydra's proxy.

    Hydra starts each rank as the leader of a session (seen), so that the leader's parent is the proxy also
    where a shell script stands between rank and proxy. Without /proc it is our own parent.
    """
    try:
        stat = Path(f"/proc/{os.getsid(0)}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return os.getppid()
