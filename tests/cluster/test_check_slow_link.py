"""The search for the node or link at fault, where a link is slow, a node hangs, or nothing is wrong.

A slow node, and two that do not reach each other, are in ``test_check_culprit``.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import wait_until
from links import shaped
from nodes import Network, Node

from allranks.record.selftest import SearchResult, read
from waiting import PATIENCE

PORT = 29612
#: What goes from a node to one address beyond the rate is lost: it is 15 times as slow as a link of ``EVEN``.
SLOW_LINK = """table ip slow {{
  chain out {{
    type filter hook output priority 0
    ip daddr {to} limit rate over 1 mbytes/second burst 200 kbytes drop
  }}
}}
"""


@pytest.fixture
def network(bare_network: Network) -> Network:
    """Give nodes that need no sshd: all processes on them are killed after each test."""
    return bare_network


@pytest.fixture
def undo() -> Iterator[Callable[[Node, str], None]]:
    """Give a function that has a line of shell run on a node after the test."""
    lines: list[tuple[Node, str]] = []
    yield lambda node, line: lines.append((node, line))
    for node, line in reversed(lines):
        node.run(line)


class Searching:
    """The ranks of a search, one on each node."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.ranks: list[subprocess.Popen[Any]] = []

    def start(self, *args: str) -> None:
        names = [*self.network.nodes]
        source = Path(__file__).parents[2] / "src"
        for rank, name in enumerate(names):
            log = self.folder / "attempts/000" / f"node-{rank:03}"
            log.mkdir(parents=True)
            settings = {
                "RANK": rank,
                "LOCAL_RANK": 0,
                "WORLD_SIZE": len(names),
                "LOCAL_WORLD_SIZE": 1,
                "GROUP_RANK": rank,
                "MASTER_ADDR": self.network.nodes[names[0]].ip,
                "MASTER_PORT": PORT,
                "ALLRANKS_BACKEND": "gloo",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": 1,
                "PYTHONPATH": source,
            }
            command = [sys.executable, "-m", "allranks.selftest.search", *args]
            with (log / "rank.out").open("w") as out, (log / "rank.err").open("w") as err:
                words = ["env", *(f"{key}={value}" for key, value in settings.items()), *command]
                self.ranks.append(self.network.nodes[name].popen(words, stdout=out, stderr=err))

    def told(self) -> SearchResult:
        """Wait until the first node has told, and end all others."""
        self.ranks[0].wait(PATIENCE)
        told = read(self.folder / "attempts/000")
        assert len(told) == 1, [path.read_text() for path in self.folder.rglob("*.err")]
        assert isinstance(told[0], SearchResult)
        return told[0]


@pytest.fixture
def searching(network: Network, tmp_path: Path) -> Iterator[Searching]:
    found = Searching(network, tmp_path)
    yield found
    for node in network.nodes.values():
        node.run("kill -KILL -1 || true")  # Its PID 1 is not among them, and keeps the node.
    for rank in found.ranks:
        rank.send_signal(signal.SIGCONT)  # nsenter stops itself beside what it has started.
        rank.wait()


def nodes_of(told: SearchResult) -> list[list[int]]:
    return [culprit["nodes"] for culprit in told.culprits]


def test_a_slow_link(searching: Searching, network: Network, undo: Any) -> None:
    """It takes more than 10 s: the search for the link has groups of nodes measure one after the other."""
    node = network.nodes["gpu04"]
    node.run(["nft", "-f", "-"], input=SLOW_LINK.format(to=network.nodes["gpu02"].ip))
    undo(node, "nft delete table ip slow")
    with shaped(network):
        searching.start("--timeout", "20")
        told = searching.told()
    assert (nodes_of(told), told.silent) == ([[1, 3]], ()), asdict(told)
    assert told.culprits[0]["seconds"] > 3 * told.usual


def test_a_node_that_hangs(searching: Searching, network: Network) -> None:
    """It takes more than 10 s: all other nodes must have come, which import torch, before one counts as silent."""
    node = network.nodes["gpu03"]
    searching.start("--coming", "30")  # The others are as late as that on a busy machine.
    look = "grep -lsaF allranks.selftest.search /proc/[0-9]*/cmdline | grep -v /$$/ || true"
    wait_until("the rank to be there", lambda: node.run(look))
    node.run("kill -STOP -1")
    assert searching.told() == SearchResult(0, silent=(2,), hosts=("gpu01", "gpu02", "", "gpu04"))
    assert searching.ranks[0].returncode == 1


def test_nothing_is_found_on_good_nodes(searching: Searching, network: Network) -> None:
    """It takes more than 10 s: groups of nodes measure one after the other."""
    with shaped(network):
        searching.start("--timeout", "60")
        told = searching.told()
    # Whether four nodes on the CPUs of this machine are slow beside two depends on what else it does.
    assert (told.culprits, told.more, told.silent) == ((), 0, ()), asdict(told)
    assert told.hosts == ("gpu01", "gpu02", "gpu03", "gpu04")
    assert [rank.wait(PATIENCE) for rank in searching.ranks] == [0, 0, 0, 0]
