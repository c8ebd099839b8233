"""Ranks that a bare srun starts find each other by ``allranks.init()``: no launcher of ours is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks_told import TELL, expected, who
from slurm_cluster import SlurmCluster

from waiting import PATIENCE

#: Each rank adds its own number: the sum tells whether all have met, each once.
SCRIPT = f"""\
import json, os, socket
import torch, torch.distributed as dist
import allranks
with allranks.init() as ctx:
    numbers = torch.tensor([float(ctx.rank), 1.0])
    dist.all_reduce(numbers)
    total = numbers[1]
    print("sum", int(numbers[0]), "at rank", ctx.rank, "of", ctx.world_size, flush=True)
    {TELL}
"""


@pytest.mark.parametrize("spread", [(), ("--ntasks-per-node=2",)])
def test_a_bare_srun_is_enough(slurm: SlurmCluster, work: Path, spread: tuple[str, ...]) -> None:
    """It takes more than 10 s: without an agent each rank imports torch for itself."""
    (work / "train.py").write_text(SCRIPT)
    shown = slurm.run("srun", "-N2", "-n4", *spread, "python", "train.py", folder=work, timeout=PATIENCE)
    hosts = [rank[4] for rank in who(shown)]
    counts = [hosts.count("node01"), hosts.count("node02")]  # Left to itself, Slurm starts three on the first.
    assert all(counts)
    assert not spread or counts == [2, 2]
    assert who(shown) == expected(counts)
    sums = sorted(line for line in shown.splitlines() if line.startswith("sum "))
    assert sums == [f"sum 6 at rank {rank} of 4" for rank in range(4)]
