"""Ranks of several nodes that need no torch: no agent imports it, but that of node 0 once a rank connects."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_tools import GATE, count_imports

from agents_by_hand import ByHand
from allranks import contract
from waiting import wait_for

HOST = socket.gethostname()
#: Rank 3, of node 1, fails once.
FAILS_ONCE = """\
import os, sys, time
rank, generation = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE TORCHELASTIC_RESTART_COUNT"
print(*(os.environ[name] for name in names.split()), flush=True)
if generation == "0":
    sys.exit(5) if rank == "3" else time.sleep(300)
"""
#: Both ranks connect, as torch.distributed would, and rank 1 fails; ranks that follow start a program.
STARTS_A_CHILD = """\
import os, socket, subprocess, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    line = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    sys.exit(3) if os.environ["RANK"] == "1" else time.sleep(300)
sys.exit(subprocess.call([sys.executable, "child.py"]))
"""
CHILD = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(os.environ["RANK"], int(total), os.environ["MASTER_PORT"], flush=True)
dist.destroy_process_group()
"""
#: Rank 1, which is not on node 0, connects; all wait for a file.
CONNECTS = """\
import os, socket, time
if os.environ["RANK"] == os.environ.get("CONNECTS", "1"):
    line = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
while not os.path.exists("go"):
    time.sleep(.01)
"""


@pytest.fixture
def run(tmp_path: Path, allranks_env: dict[str, str]) -> Iterator[ByHand]:
    """Give a run of two nodes whose agents are started by hand."""
    run = ByHand(tmp_path / "runs" / "by-hand", allranks_env)
    yield run
    run.close()


def imported(imports: Path) -> Callable[[], list[str]]:
    """Return what gives the process ids of the interpreters that have started to import torch."""
    return lambda: imports.read_text().split() if imports.exists() else []


@pytest.mark.smoke
def test_no_node_imports_torch_for_ranks_that_need_none_and_are_restarted(run: ByHand) -> None:
    run.orders(FAILS_ONCE, max_restarts=1)
    imports, env = count_imports(run)
    run.start(**env)
    assert run.wait() == [0, 0]
    assert imported(imports)() == []
    for node in (0, 1):
        assert [run.said(node, rank) for rank in (2 * node, 2 * node + 1)] == [
            f"{rank} {local} 4 2 {node} 2 0\n{rank} {local} 4 2 {node} 2 1\n"
            for local, rank in enumerate((2 * node, 2 * node + 1))
        ]
        (restart,) = run.events(node, contract.RESTART)
        assert (restart["restart"], restart["delay"], restart["because_of_rank"]) == (1, 0.0, 3)
        assert run.events(node, contract.AGENT_STARTED)[0]["torch"] is None
        assert run.ended(node) == ("SUCCEEDED", 0, None, None)


def test_programs_that_ranks_start_form_a_group_and_only_node_0_imports_torch_for_it(run: ByHand) -> None:
    """torch is imported since the first generation, in which ranks have connected and failed.

    It takes more than 10 s on a slow machine: the agent of node 0 imports torch, and so do both programs.
    """
    run.orders(STARTS_A_CHILD, max_restarts=1)
    (run.folder / "child.py").write_text(CHILD)
    imports, env = count_imports(run)
    run.start(ranks=1, **env)
    assert run.wait() == [0, 0], run.said(0, 0, "err") + run.said(1, 1, "err")
    first, second = (event["master_port"] for event in run.events(1, contract.RANKS_STARTED))
    assert (run.said(0, 0), run.said(1, 1)) == (f"0 2 {second}\n", f"1 2 {second}\n")
    assert first != second
    agent, *children = imported(imports)()
    assert agent == str(run.agents[0].pid)
    assert len({*children} - {str(run.agents[1].pid)}) == 2
    assert [event["code"] for node in (0, 1) for event in run.events(node, contract.RANK_EXITED)] == [-15, 0, 3, 0]


def test_a_node_is_lost_while_torch_is_imported(run: ByHand) -> None:
    run.orders(CONNECTS, min_nodes=1)
    imports, env = count_imports(run, GATE)
    os.mkfifo(run.folder / "gate")
    run.start(ranks=1, **env)
    wait_for("the import of torch", lambda: imported(imports)() == [str(run.agents[0].pid)])
    run.agents[1].kill()
    assert run.event(0, contract.RANKS_STARTED, 2)["world_size"] == 1
    (run.folder / "go").touch()
    assert run.wait(0) == [0]
    (lost,) = run.events(0, contract.NODE_LOST)
    assert (lost["node"], lost["why"]) == (1, "its agent is gone")


@pytest.mark.parametrize("rank", ["none", "1"])
def test_where_there_is_no_torch_ranks_run_until_one_connects(run: ByHand, rank: str) -> None:
    run.orders(CONNECTS)
    torch = run.folder / "site" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise ImportError('there is none')\n")
    if rank == "none":
        (run.folder / "go").touch()
    run.start(ranks=1, PYTHONPATH=str(torch.parent), CONNECTS=rank)
    assert run.wait() == ([0, 0] if rank == "none" else [1, 1])
    if rank == "none":
        assert [run.ended(node)[0] for node in (0, 1)] == ["SUCCEEDED"] * 2
        return
    what = f"{sys.executable} cannot import torch"
    assert run.ended(0) == ("FAILED", 1, None, what)
    assert run.ended(1) == ("FAILED", 1, None, f"node 0 ({HOST}): {what}")
    (error,) = run.events(0, contract.ERROR)
    assert (error["what"], error["why"]) == (what, "there is none")
