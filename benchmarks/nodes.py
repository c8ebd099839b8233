"""Start of the agents of two nodes to the first all-reduce, 2 ranks each over gloo: ours / torchrun (c10d).

Both nodes are this machine. Then the same to the end of the last agent.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness import NOT_USUAL, PYTHON, TORCHRUN, in_turn, report, workplace
from start import SCRIPT

from allranks import contract
from allranks.record.files import copy_node_code
from allranks.record.spec import NodeSpec

NODES = (0, 1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def ours(folder: Path, node: int, port: int) -> tuple[list[str], dict[str, str]]:
    values = (node, 2, 2, "127.0.0.1", port)
    place = dict(zip(contract.OF_A_NODE, map(str, values), strict=True))
    return [PYTHON, str(folder / "code"), str(folder / "node.json")], {**place, contract.ATTEMPT: "0"}


def theirs(folder: Path, node: int, port: int) -> tuple[list[str], dict[str, str]]:
    options = ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "bench")
    return [*TORCHRUN, *options, "--rdzv-endpoint", f"127.0.0.1:{port}", str(folder / "script.py")], {}


def measure(
    folder: Path, start: Callable[[Path, int, int], tuple[list[str], dict[str, str]]], ends: list[float]
) -> float:
    port = free_port()
    usual = {name: value for name, value in os.environ.items() if name not in NOT_USUAL}
    agents, began = [], time.time()
    for node in NODES:
        command, variables = start(folder, node, port)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        agents.append(subprocess.Popen(command, cwd=folder, env={**usual, **variables}, **quiet))
    if any(agent.wait(120) for agent in agents):
        sys.exit("an agent failed")
    ends.append(time.time() - began)
    return max(float((folder / f"first-{rank}").read_text()) for rank in range(4)) - began


def main() -> None:
    with workplace(script=SCRIPT) as folder:
        copy_node_code(folder / "code")
        spec = NodeSpec(
            run_id="bench",
            run_dir=str(folder),
            attempt=0,
            node=0,
            nnodes=2,
            nproc_per_node=2,
            kind="script",
            target=str(folder / "script.py"),
            args=(),
            python_options=(),
            warm=True,
            max_restarts=0,
            restart_delay=1.0,
            stop_timeout=5.0,
            master_addr="127.0.0.1",
            master_port=None,
            file_mode=0o600,
            min_nodes=2,
        )
        (folder / "node.json").write_text(spec.to_json())
        whole: tuple[list[float], list[float]] = ([], [])
        medians = in_turn(9, partial(measure, folder, ours, whole[0]), partial(measure, folder, theirs, whole[1]))
    report("two agents' start to first all-reduce", *medians, "s", "<= 0.6")
    report("two agents' start to the end of both", *(sorted(times)[len(times) // 2] for times in whole), "s", "<= 0.9")


if __name__ == "__main__":
    main()
