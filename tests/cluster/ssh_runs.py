"""What tests of runs over SSH share: waiting for their ranks, and what the nodes still have of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster_tools import wait_until
from nodes import Network

#: A rank that goes on until it is told to end.
UP = "import time\nprint('up', flush=True)\nwhile True:\n    time.sleep(0.05)\n"


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

    wait_until("all ranks to be up", are_up, 90)
    run: Path = ssh.run()
    wait_until("the launcher to know all agents", lambda: ssh.record(run)["handle"]["extra"].get("nodes"), 20)
    return run


def assert_rank_1_is_blamed(allranks: Any, network: Network, *options: str) -> None:
    """Have the second of two ranks fail, on the second node; the error names both, and nothing is left."""
    allranks.script(f"import os\nif os.environ['RANK'] == '1':\n    raise ValueError('no data')\n{UP}")
    done = allranks("run", "train.py", *options)
    name = allranks.run().name
    assert done.rc == 1
    assert done.stderr.splitlines()[-4:] == [
        "error: rank 1 on gpu02 ended with exit code 1",
        "  why: ValueError: no data",
        f"  fix: allranks logs {name} --rank 1",
        f"  see: runs/{name}/attempts/000/node-001/rank-1.err",
    ]
    assert left_on(network, allranks.run()) == {}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
