"""What tests of runs over SSH share: waiting for their ranks, and what the nodes still have of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster_tools import wait_until
from nodes import Network


def left_on(network: Network, run: Path) -> dict[str, str]:
    """Return what the nodes still have of a run, by node."""
    look = f"grep -lsxzF 'ALLRANKS_RUN_DIR={run}' /proc/[0-9]*/environ || true"
    found = {name: node.run(look) for name, node in network.nodes.items() if node.is_alive}
    return {name: text for name, text in found.items() if text}


def wait_for_ranks(ssh: Any, *ranks: str) -> Path:
    """Wait until ranks, each named with its node, have said that they are up; return the run."""
    logs = [f"node-{rank.partition(':')[0]:>03}/rank-{rank.partition(':')[2]}.out" for rank in ranks]

    def are_up() -> bool:
        return bool(ssh.runs()) and all(_text(ssh.run() / "attempts/000" / log) == "up\n" for log in logs)

    wait_until("all ranks to be up", are_up)
    run: Path = ssh.run()
    wait_until("the launcher to know all agents", lambda: ssh.record(run)["handle"]["extra"].get("nodes"))
    return run


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
