"""What ranks of two nodes measure of the links between them: both nodes are this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.record.selftest import Link, read
from warm_python import WarmPython

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


def measured(folder: Path, warm_ranks: WarmPython, enough: float) -> list[tuple[int, int]]:
    """Have two nodes of two ranks measure; return which ranks have sent to which."""
    script = folder / "measure.py"
    script.write_text(MEASURE)
    done = warm_ranks.run_ranks(script, [enough], folder, count=4, ranks_of_a_node=2)
    for rank, (code, out, err) in enumerate(done):
        assert code == 0, err.decode()
        log = folder / f"node-{rank // 2}" / f"rank-{rank}.out"
        log.parent.mkdir(exist_ok=True)
        log.write_bytes(out)
    told = read(folder)
    assert all(isinstance(link, Link) and link.seconds > 0 and link.size >= 1 << 16 for link in told)
    return [(link.rank, link.target) for link in told if isinstance(link, Link)]


@pytest.mark.parametrize(("enough", "further"), [(60.0, [(1, 3), (3, 1)]), (0.0, [])])
def test_each_rank_sends_to_the_same_of_the_next_node(
    tmp_path: Path, warm_ranks: WarmPython, enough: float, further: list[tuple[int, int]]
) -> None:
    assert sorted(measured(tmp_path, warm_ranks, enough)) == sorted([(0, 2), (2, 0), *further])
