"""From sbatch to the end of the first all-reduce, 2 nodes x 2 ranks of a Slurm on this machine: ours / torchrun.

Needs root and Slurm's packages, as ``make cluster`` does.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from harness import ALLRANKS, PYTHON, checked, in_turn, report, workplace

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))

from slurm_cluster import SlurmCluster
from slurm_conf import Shape
from slurm_daemons import why_no_slurm

RANKS = range(4)
SCRIPT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
open(f"first-{os.environ['RANK']}", "w").write(repr(time.time()))
dist.barrier()
dist.destroy_process_group()
"""
#: What people write: the first host, a port from the job's id, an agent on each node.
PLAIN = f"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --time=5
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
srun bash -c 'exec {Path(PYTHON).parent}/torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
  --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT script.py'
"""
CLUSTERS = "lab: {kind: slurm, resources: {time: 5min}, launch: {backend: gloo}}\n"


def main() -> None:
    if why := why_no_slurm(Shape()):
        print(f"skipped: no Slurm cluster on this machine: {why}")
        return
    with (
        tempfile.TemporaryDirectory(prefix="sl-") as own,
        SlurmCluster(Path(own)) as cluster,
        workplace(script=SCRIPT) as folder,
    ):
        _measure(cluster, folder)


def _measure(cluster: SlurmCluster, folder: Path) -> None:
    os.environ.update(cluster.env)
    (folder / "plain.sh").write_text(PLAIN)
    (folder / "clusters.yaml").write_text(CLUSTERS)
    asked = ["script.py", "--on", "lab", "--nodes", "2", "--gpus-per-node", "2"]
    checked([*ALLRANKS, "plan", *asked, "-o", "ours.sh"], folder)

    def first(command: list[str]) -> float:
        cluster.wait_idle()
        for rank in RANKS:
            (folder / f"first-{rank}").unlink(missing_ok=True)
        began = time.time()
        checked(command, folder)
        return cluster.wait_until("the first all-reduce", lambda: _ended(folder), 60) - began

    def _ended(folder: Path) -> float | None:
        told = [(folder / f"first-{rank}") for rank in RANKS]
        texts = [path.read_text() for path in told if path.exists()]
        return max(map(float, texts)) if len(texts) == len(RANKS) and all(texts) else None

    typed, ours, theirs = in_turn(
        7,
        lambda: first([*ALLRANKS, "run", *asked, "--detach"]),
        lambda: first(["sbatch", "ours.sh"]),
        lambda: first(["sbatch", "plain.sh"]),
    )
    report("sbatch to first all-reduce, 2 nodes x 2 ranks", ours, theirs, "s", "<= 0.37")
    report("the same from `allranks run`, its start included", typed, theirs, "s", "none")


if __name__ == "__main__":
    main()
