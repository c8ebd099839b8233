"""One start of all ranks: their places in the world, and the environment variables that tell them of it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from allranks import contract
from allranks.contract import NodeSpec

#: torch knows ranks of several roles; all of ours have this one.
ROLE = "default"


@dataclass(frozen=True)
class Generation:
    """The ranks of this node between two restarts.

    Attributes:
        restart: 0 for the first generation.
        node_rank: this node's place among the nodes.
        nodes: how many nodes there are.
        world_size: how many ranks there are on all nodes.
        ranks: the global ranks on this node, by local rank.
        master_addr: where the ranks meet.
        master_port: likewise.
    """

    restart: int
    node_rank: int
    nodes: int
    world_size: int
    ranks: tuple[int, ...]
    master_addr: str
    master_port: int


def alone(node: NodeSpec, restart: int, master_port: int) -> Generation:
    """Return a generation of the only node of a job."""
    ranks = tuple(range(node.nproc_per_node))
    return Generation(restart, 0, 1, node.nproc_per_node, ranks, node.master_addr, master_port)


def variables(node: NodeSpec, generation: Generation, local_rank: int, error_file: str) -> dict[str, str]:
    """Return what torchrun gives a rank (its documentation, section Environment Variables), and ours."""
    rank, size = str(generation.ranks[local_rank]), str(generation.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(len(generation.ranks)),
        "GROUP_RANK": str(generation.node_rank),
        "GROUP_WORLD_SIZE": str(generation.nodes),
        "ROLE_NAME": ROLE,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": generation.master_addr,
        "MASTER_PORT": str(generation.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(generation.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(node.max_restarts),
        "TORCHELASTIC_RUN_ID": node.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        contract.RUN_ID: node.run_id,
        contract.RUN_DIR: node.run_dir,
        contract.ATTEMPT: str(node.attempt),
    }
