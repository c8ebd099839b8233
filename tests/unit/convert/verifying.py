"""What the tests of ``allranks convert --verify`` share: the command, and the heads of scripts."""

from __future__ import annotations

import subprocess

import pytest

from allranks.cli import convert

_WORDS = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "true"]
NAMESPACES = pytest.mark.skipif(
    subprocess.run(_WORDS, check=False, capture_output=True).returncode != 0, reason="namespaces cannot be made here"
)


def typed(*words: str) -> int:
    """Type the command, and return its exit code."""
    code = convert.command.main([*words, "--verify"], standalone_mode=False)
    assert isinstance(code, int)
    return code


SLURM = (
    "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n#SBATCH --time=1:00:00\n"
)
HEAD = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
C10D = "--nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$MASTER_ADDR:29500"
PBS = "#!/bin/bash\n#PBS -l select=2:ncpus=8:ngpus=4\n#PBS -l walltime=1:00:00\ncd $PBS_O_WORKDIR\n"
STATIC = "--nnodes=2 --nproc-per-node=4 --master-addr=gpu1 --master-port=29500"
GRID = "#!/bin/bash\n#$ -cwd\n#$ -pe smp 8\n#$ -l gpu=2\n#$ -l h_rt=1:00:00\n"
ONE = "#!/bin/bash\n#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=4 --time=1:00:00\n"
TRAIN = "torchrun --standalone --nproc-per-node=2 train.py\n"
