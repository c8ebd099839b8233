"""torchrun, our own agent, and everybody who sets the variables by hand.

Source: the section "Environment Variables" of torch.distributed.run.
"""

from __future__ import annotations

from allranks.runtime.environment.base import EnvironmentKind, Variables


class TorchElastic(EnvironmentKind):
    """RANK and its companions."""

    name = "torchrun"
    rank = ("RANK",)
    world_size = ("WORLD_SIZE",)
    local_rank = ("LOCAL_RANK",)
    local_world_size = ("LOCAL_WORLD_SIZE",)
    node_rank = ("GROUP_RANK",)
    restart = ("TORCHELASTIC_RESTART_COUNT",)

    def master(self, env: Variables, several_hosts: bool) -> tuple[str, int]:
        """Take MASTER_ADDR and MASTER_PORT; whoever sets RANK sets them too."""
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
