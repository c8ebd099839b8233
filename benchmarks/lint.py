"""`allranks lint` on 200 scripts, against the one second that it may take."""

from __future__ import annotations

from harness import ALLRANKS, checked, in_turn, report, timed, workplace

#: A script of the length and kind that people have, with no fault above a hint.
SCRIPT = """#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail
source /opt/venv/bin/activate
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=8
ARGS=(
    --data /data/imagenet
    --epochs 90
    --batch-size 256
    --output "runs/$SLURM_JOB_ID"
)
if [ -f "runs/last/checkpoint.pt" ]; then
    ARGS+=(--resume runs/last/checkpoint.pt)
fi
for directory in logs "runs/$SLURM_JOB_ID"; do
    mkdir -p "$directory"
done
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 torchrun \\
    --nnodes="$SLURM_NNODES" \\
    --nproc-per-node=4 \\
    --rdzv-backend=c10d \\
    --rdzv-id="$SLURM_JOB_ID" \\
    --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \\
    train.py "${ARGS[@]}"
"""


def main() -> None:
    with workplace() as folder:
        for number in range(200):
            (folder / f"job-{number}.sh").write_text(SCRIPT)
        checked([*ALLRANKS, "lint", "."], folder)
        ours, start = in_turn(
            5, lambda: timed([*ALLRANKS, "lint", "."], folder), lambda: timed([*ALLRANKS, "--help"], folder)
        )
    report("lint of 200 scripts against allranks --help", ours, start, "s", "ours <= 1 s")


if __name__ == "__main__":
    main()
