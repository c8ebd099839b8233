"""Open MPI's mpirun.

Source: "Environment variables set by mpirun" in Open MPI's manual; seen with 4.1.4.
"""

from __future__ import annotations

from allranks.runtime.environment.base import EnvironmentKind, Variables


class OpenMpi(EnvironmentKind):
    """OMPI_COMM_WORLD_RANK and its companions.

    OMPI_COMM_WORLD_NODE_RANK is no node rank: it is a rank among those on this host, of all jobs there.
    """

    name = "Open MPI"
    rank = ("OMPI_COMM_WORLD_RANK",)
    world_size = ("OMPI_COMM_WORLD_SIZE",)
    local_rank = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    local_world_size = ("OMPI_COMM_WORLD_LOCAL_SIZE",)

    def find_node_rank(self, env: Variables) -> int | None:
        """Say 0 where all ranks are on this host; Open MPI does not tell otherwise."""
        return 0 if self.find_local_world_size(env) == self.find_world_size(env) else None

    def job_key(self, env: Variables) -> str:
        """Give the name of the job in PMIx, or in Open MPI's own runtime before that."""
        return self.get(env, ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_SERVER_URI2")) or "openmpi"
