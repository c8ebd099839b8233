"""A node's place, from its environment: only the node knows it, and the orders are the same for all nodes of a run."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from allranks import contract
from allranks.contract import NodeSpec
from allranks.errors import LaunchError

_HIGHEST_PORT = 65535


def is_placed(environ: Mapping[str, str]) -> bool:
    """Return whether the environment of this agent has its place."""
    return any(environ.get(name) for name in contract.OF_A_NODE)


def placed(spec: NodeSpec, environ: Mapping[str, str]) -> NodeSpec:
    """Return the orders with this node's place in them; as they are if the environment has none.

    Raises:
        LaunchError: a variable of the place is missing or invalid.
    """
    if not is_placed(environ):
        return spec
    needed = (*contract.OF_A_NODE, contract.ATTEMPT)
    if missing := [name for name in needed if not environ.get(name)]:
        raise _invalid(f"{' and '.join(missing)} not set", f"{len(needed) - len(missing)} of {len(needed)} are")
    nodes = _number(environ, contract.NODE_COUNT, 1)
    if nodes < spec.min_nodes:
        raise LaunchError(
            f"{nodes} of at least {spec.min_nodes} nodes are here",
            why=f"{contract.NODE_COUNT} is {nodes}",
            fix="ask for more nodes, or for fewer at least: resources.nodes (--nodes)",
        )
    is_name = spec.kind == "module" or (spec.kind == "binary" and os.sep not in spec.target)
    mine = replace(
        spec,
        run_dir=environ.get(contract.RUN_DIR) or spec.run_dir,  # A task of a job array has a directory of its own.
        attempt=_number(environ, contract.ATTEMPT, 0),
        node=_number(environ, contract.NODE_RANK, 0, nodes - 1),
        nnodes=nodes,
        nproc_per_node=_number(environ, contract.NODE_NPROC, 1),
        # Relative to the working directory where each node has a copy of that.
        target=spec.target if is_name else str(Path.cwd() / spec.target),
    )
    port = _number(environ, contract.RDZV_PORT, 1, _HIGHEST_PORT)
    # The ranks of a single node meet where the orders say.
    return mine if nodes == 1 else replace(mine, master_addr=environ[contract.RDZV_HOST], master_port=port)


def _number(environ: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    text = environ[name]
    if text.isdecimal() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    limits = f"of {least} or more" if most is None else f"from {least} to {most}"
    raise _invalid(f"{name}={text} (expected a number {limits})")


def _invalid(what: str, why: str | None = None) -> LaunchError:
    return LaunchError(
        f"agent on {socket.gethostname()}: invalid node environment: {what}",
        why=why,
        fix=f"set {', '.join((*contract.OF_A_NODE, contract.ATTEMPT))}, as the run's script does, or none of them",
    )
