"""The search for a node at fault, with a process of this machine for each node."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.record.selftest import SearchResult, read
from waiting import PATIENCE

#: A rank that starts to search only when others have imported torch too, and whose own process for measurements has:
#: a limit of a few seconds then counts the waiting for those that never come.
TOGETHER = """
import os, pathlib, sys, time
from allranks.selftest import search
folder, ranks = pathlib.Path(sys.argv.pop(1)), sys.argv.pop(1).split(",")
def all_are(what):
    (folder / f"{what}-{os.environ['RANK']}").touch()
    while not all((folder / f"{what}-{rank}").exists() for rank in ranks):
        time.sleep(0.01)
come = search._Node.come
def come_together(node):
    come(node)
    all_are("here")
search._Node.come = come_together
all_are("ready")
search.main()
"""


class Nodes:
    """The ranks of a search, all on this machine."""

    def __init__(self, folder: Path, count: int = 3) -> None:
        self.folder, self.count = folder, count
        self.ranks: dict[int, subprocess.Popen[Any]] = {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def start(self, rank: int, *args: str, interface: str = "lo", together: str = "") -> None:
        log = self.folder / f"node-{rank:03}"
        log.mkdir()
        of_rank = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": self.count, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port, "GLOO_SOCKET_IFNAME": interface}
        settings = {**of_rank, **where, "ALLRANKS_BACKEND": "gloo", "OMP_NUM_THREADS": 1}
        environ = {**os.environ, **{name: str(value) for name, value in settings.items()}}
        program = ["-c", TOGETHER, str(self.folder), together] if together else ["-m", "allranks.selftest.search"]
        command = [sys.executable, *program, *args]
        with (log / "rank.out").open("w") as out, (log / "rank.err").open("w") as err:
            self.ranks[rank] = subprocess.Popen(command, stdout=out, stderr=err, env=environ)

    def end(self) -> None:
        for rank in self.ranks.values():
            rank.kill()
            rank.wait()

    def told(self) -> tuple[SearchResult, int]:
        """Wait for the first one; return what it has told, and how it ended."""
        code = self.ranks[0].wait(PATIENCE)
        told = read(self.folder)
        assert len(told) == 1, [path.read_text() for path in self.folder.rglob("*.err")]
        assert isinstance(told[0], SearchResult)
        return told[0], code


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    found = Nodes(tmp_path)
    yield found
    found.end()


def test_a_node_whose_collectives_fail_is_found_with_what_it_says(nodes: Nodes) -> None:
    """It takes more than 10 s: three nodes import torch twice, and in each round peers wait for the bad one."""
    for rank in range(3):
        nodes.start(rank, "--timeout", "3", interface="nowhere0" if rank == 1 else "lo")
    told, code = nodes.told()
    (culprit,) = told.culprits
    assert (culprit["nodes"], culprit["seconds"], code) == ([1], None, 0)
    assert "nowhere0" in culprit["error"]
    assert [rank.wait(PATIENCE) for rank in nodes.ranks.values()] == [0, 0, 0]


def test_a_node_that_does_not_come_is_named(nodes: Nodes) -> None:
    """It takes more than 10 s: two nodes import torch, each twice."""
    for rank in (0, 1):
        nodes.start(rank, "--coming", "3", together="0,1")
    host = socket.gethostname()
    assert nodes.told() == (SearchResult(0, silent=(2,), hosts=(host, host, "")), 1)


def test_two_nodes_that_are_slower_than_is_expected(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """It takes more than 10 s: two nodes import torch, each twice."""
    nodes = Nodes(tmp_path, 2)
    request.addfinalizer(nodes.end)
    for rank in range(2):
        nodes.start(rank, "--least", "1e15")
    told, code = nodes.told()
    (culprit,) = told.culprits
    assert (culprit["nodes"], told.is_bad, told.least, code) == ([0, 1], True, 1e15, 0)
    assert culprit["seconds"] == told.seconds == told.usual


def test_nodes_of_which_none_is_at_fault(nodes: Nodes) -> None:
    """It takes more than 10 s: three nodes import torch, each twice."""
    for rank in range(3):
        nodes.start(rank)
    host = socket.gethostname()
    told, code = nodes.told()
    assert (told.culprits, told.more, told.silent, told.hosts, code) == ((), 0, (), (host, host, host), 0)
    assert told.seconds
    assert told.usual
    assert (told.backend, told.least) == ("gloo", 0.0)
    assert [rank.wait(PATIENCE) for rank in nodes.ranks.values()] == [0, 0, 0]
