"""Scripts that were written for Lightning or Accelerate run as they are, when srun starts their ranks or torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster

from waiting import PATIENCE

SCRIPTS = Path(__file__).parent.parent / "scripts"
SRUN = ["srun", "--nodelist=node[01-02]", "--nodes=2", "--ntasks-per-node=1", "--export=ALL,OMP_NUM_THREADS=1"]
TORCHRUN = ["torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=node01:29500"]
#: Lightning reads Slurm's own variables. Accelerate does not, but PMI's on CPUs, if it is told the master address.
BY_SRUN = {
    "lightning": ["python"],
    "accelerate": ["--mpi=pmi2", "env", "MASTER_ADDR=node01", "MASTER_PORT=29500", "python"],
}
OPTIONS = {"lightning": ["--devices=1", "--num-nodes=2"], "accelerate": []}


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_an_unmodified_script_runs_on_two_nodes(slurm: SlurmCluster, work: Path, launcher: str, name: str) -> None:
    """It takes more than 10 s: each rank imports torch and a framework."""
    pytest.importorskip(name)
    started = BY_SRUN[name] if launcher == "srun" else TORCHRUN
    script = SCRIPTS / f"{name}_script.py"
    shown = slurm.run(*SRUN, *started, script, *OPTIONS[name], folder=work, timeout=PATIENCE)
    found = re.findall(rf"{name}: rank (\d+) of (\d+) steps (\d+)", shown)
    assert sorted(found) == [("0", "2", "4"), ("1", "2", "4")]
