"""What ranks of two nodes measure of the links between them: both nodes are this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.record.selftest import Link, read
from waiting import PATIENCE

MEASURE = """
import sys
import allranks
from allranks.record.selftest import send
from allranks.selftest import bandwidth

bandwidth._ENOUGH = float(sys.argv[1])
with allranks.init(backend="gloo") as ctx:
    for link in bandwidth.links(ctx):
        send(link)
"""


def measured(folder: Path, enough: float) -> list[tuple[int, int]]:
    """Have two nodes of two ranks measure; return which ranks have sent to which."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in range(4):
        log = folder / f"node-{rank // 2}" / f"rank-{rank}.out"
        log.parent.mkdir(exist_ok=True)
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2), "OMP_NUM_THREADS": "1"}
        with log.open("w") as out:
            command = [sys.executable, "-c", MEASURE, str(enough)]
            ranks.append(subprocess.Popen(command, env={**shared, **mine}, stdout=out))
    assert [rank.wait(PATIENCE) for rank in ranks] == [0] * 4
    told = read(folder)
    assert all(isinstance(link, Link) and link.seconds > 0 and link.size >= 1 << 16 for link in told)
    return [(link.rank, link.target) for link in told if isinstance(link, Link)]


@pytest.mark.parametrize(("enough", "further"), [(60.0, [(1, 3), (3, 1)]), (0.0, [])])
def test_each_rank_sends_to_the_same_of_the_next_node(
    tmp_path: Path, enough: float, further: list[tuple[int, int]]
) -> None:
    assert sorted(measured(tmp_path, enough)) == sorted([(0, 2), (2, 0), *further])
