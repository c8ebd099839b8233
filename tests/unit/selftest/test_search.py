"""The search for a node at fault, with a process of this machine for each node."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.record.selftest import SearchResult, read
from environments import clean_environment
from waiting import PATIENCE
from warm_python import WarmProcess, WarmPython, free_port

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

    def __init__(self, folder: Path, warm: WarmPython, count: int = 3) -> None:
        self.folder, self.count = folder, count
        self.ranks: dict[int, WarmProcess] = {}
        self.warm, self.port = warm, free_port()

    def start(self, rank: int, *args: str, interface: str = "lo", together: str = "") -> None:
        of_rank = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": self.count, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port, "GLOO_SOCKET_IFNAME": interface}
        settings = {**of_rank, **where, "ALLRANKS_BACKEND": "gloo", "OMP_NUM_THREADS": 1}
        environ = clean_environment(self.folder) | {name: str(value) for name, value in settings.items()}
        if together:
            script = self.folder / "together.py"
            script.write_text(TOGETHER)
            what = ("script", str(script), [str(self.folder), together, *args])
        else:
            what = ("module", "allranks.selftest.search", [*args])
        assert self.warm.can_run(environ)
        self.ranks[rank] = self.warm.start(*what, self.folder, environ)

    def end(self) -> None:
        for rank in self.ranks.values():
            rank.close()

    def told(self) -> tuple[SearchResult, int]:
        """Wait for the first one; return what it has told, and how it ended."""
        code, out, err = self.ranks[0].finish(PATIENCE)
        log = self.folder / "node-000" / "rank.out"
        log.parent.mkdir()
        log.write_bytes(out)
        told = read(self.folder)
        assert len(told) == 1, err.decode()
        assert isinstance(told[0], SearchResult)
        return told[0], code


@pytest.fixture
def nodes(tmp_path: Path, warm_ranks: WarmPython) -> Iterator[Nodes]:
    found = Nodes(tmp_path, warm_ranks)
    yield found
    found.end()


def test_a_node_whose_collectives_fail_is_found_with_what_it_says(nodes: Nodes) -> None:
    """It takes more than 10 s: three nodes' children import torch, and in each round peers wait for the bad one."""
    for rank in range(3):
        nodes.start(rank, "--timeout", "3", interface="nowhere0" if rank == 1 else "lo")
    told, code = nodes.told()
    (culprit,) = told.culprits
    assert (culprit["nodes"], culprit["seconds"], code) == ([1], None, 0)
    assert "nowhere0" in culprit["error"]
    assert [nodes.ranks[rank].finish(PATIENCE)[0] for rank in (1, 2)] == [0, 0]


def test_a_node_that_does_not_come_is_named(nodes: Nodes) -> None:
    """It takes more than 10 s on a slow machine: a child of each node imports torch."""
    for rank in (0, 1):
        nodes.start(rank, "--coming", "3", together="0,1")
    host = socket.gethostname()
    assert nodes.told() == (SearchResult(0, silent=(2,), hosts=(host, host, "")), 1)


def test_two_nodes_that_are_slower_than_is_expected(
    tmp_path: Path, warm_ranks: WarmPython, request: pytest.FixtureRequest
) -> None:
    """It takes more than 10 s on a slow machine: a child of each node imports torch."""
    nodes = Nodes(tmp_path, warm_ranks, 2)
    request.addfinalizer(nodes.end)
    for rank in range(2):
        nodes.start(rank, "--least", "1e15")
    told, code = nodes.told()
    (culprit,) = told.culprits
    assert (culprit["nodes"], told.is_bad, told.least, code) == ([0, 1], True, 1e15, 0)
    assert culprit["seconds"] == told.seconds == told.usual


def test_nodes_of_which_none_is_at_fault(nodes: Nodes) -> None:
    """It takes more than 10 s on a slow machine: a child of each node imports torch."""
    for rank in range(3):
        nodes.start(rank)
    host = socket.gethostname()
    told, code = nodes.told()
    assert (told.culprits, told.more, told.silent, told.hosts, code) == ((), 0, (), (host, host, host), 0)
    assert told.seconds
    assert told.usual
    assert (told.backend, told.least) == ("gloo", 0.0)
    assert [nodes.ranks[rank].finish(PATIENCE)[0] for rank in (1, 2)] == [0, 0]
