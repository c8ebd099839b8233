"""Scripts with no fault that look as if they had one."""

from __future__ import annotations

import pytest

from allranks.lint.engine import lint

_TWO = (
    "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n#SBATCH --time=1:00:00\n"
)
_MEET = "--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$first:29511"
_ONE = _TWO.replace("--nodes=2", "--nodes=1")
_ALONE = "torchrun --standalone --nproc-per-node=4 train.py"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            f"{_TWO}first=$(hostname)\ndeclare -a ARGS=(\n    # GPUs of a node:\n    --nproc-per-node=4\n"
            f'    --nnodes=2\n    {_MEET}\n)\nsrun torchrun "${{ARGS[@]}}" train.py\n',
            id="a comment among the words of an array",
        ),
        pytest.param(f"{_ONE}printf '=%.0s' {{1..70}}\n{_ALONE}\n", id="a quoted argument that starts with ="),
        pytest.param(
            f"{_ONE.replace('per-node=1', 'per-node=4')}#SBATCH --ntasks=1\nsrun {_ALONE}\n",
            id="one task, and the most for each node",
        ),
        pytest.param(
            f"{_ONE}{_ALONE} | tee log.txt\npython evaluate.py\n", id="an exit code that pipefail would not save"
        ),
        pytest.param(
            f"{_ONE}jupyter lab --port=8000 &\npython prepare.py\nsleep infinity\n", id="a job that is a server"
        ),
        pytest.param(f"{_ONE}sudo -n nvidia-smi -pm 1\n{_ALONE}\n", id="sudo that asks for nothing"),
        pytest.param(
            f"#!/bin/bash\nCMD='{_ALONE} | tee log.txt'\neval $CMD\npython report.py\n",
            id="an exit code of eval that nothing reads",
        ),
        pytest.param(
            f"{_TWO}srun accelerate launch --config_file two.yaml --num_processes 8 train.py\n",
            id="machines that a file of accelerate may give",
        ),
        pytest.param(
            "#!/bin/sh\n#BSUB -q gpu\nsource venv/bin/activate\npython train.py\n", id="sh of a cluster with LSF"
        ),
        pytest.param(
            f"{_TWO}if [ $NODES -gt 1 ]; then\n  export MEET='--nnodes=2'\nelse\n  export MEET=\nfi\n"
            'srun bash -c "torchrun --nproc-per-node=4 ${MEET} train.py"\n',
            id="options in a variable that is not known",
        ),
        pytest.param(
            f"{_TWO}first=$(hostname)\nsrun bash -c \"torchrun --nproc-per-node=4 --nnodes=2 --log_dir='logs' "
            f'--rdzv-conf=is_host=\\$(((SLURM_NODEID)) && echo 0 || echo 1) {_MEET} train.py"\n',
            id="a text that our parser cannot read",
        ),
        pytest.param(
            "#!/bin/bash\nrank=0\nfor host in gpu1 gpu2; do\n  ssh $host bash <<END &\n/opt/venv/bin/torchrun "
            "--nnodes=2 --nproc-per-node=4 --node-rank=$rank --master-addr=gpu1 --master-port=29511 "
            "/data/train.py\nEND\n"
            "  rank=$((rank + 1))\ndone\nwait\n",
            id="a here-document in the background",
        ),
        pytest.param(
            f"{_TWO}echo tasks: $SLURM_NTASKS_PER_NODE $SLURM_GPUS\nsrun python train.py\n", id="what is printed"
        ),
        pytest.param(f"{_TWO}NODE_RANK=$SLURM_NODEID\nsrun python train.py\n", id="a rank that nobody reads"),
        pytest.param(
            f"{_ONE}srun torchrun --nnodes=1 --node-rank=$SLURM_NODEID --nproc-per-node=4 --master-port=29511 a.py\n",
            id="the rank of the only node",
        ),
        pytest.param(
            f"{_TWO}first=$(hostname)\nsrun torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$SLURM_NODEID "
            f"{_MEET} a.py\n",
            id="a node's rank that c10d does not read",
        ),
        pytest.param(f"{_ONE}{_ALONE}\n# sbatch --output=log job.sh\n", id="how to submit it"),
        pytest.param(f"{_ONE}export NCCL_IBEXT_DISABLE=1\n{_ALONE}\n", id="a variable of a plugin"),
        pytest.param(
            f"{_TWO}export DLTS_HOSTFILE=/tmp/hosts\npython deepy.py train.py conf.yml\n",
            id="Python that starts the nodes",
        ),
        pytest.param(
            "#!/bin/bash\n#PBS -l select=2\n#PBS -l walltime=1:00:00\ncd $PBS_O_WORKDIR\n"
            "mpiexec -n 8 --ppn 4 python train.py\n",
            id="whole nodes of PBS",
        ),
        pytest.param(f"{_ONE}LOG=log.txt\nset -eo pipefail\n{_ALONE} | tee $LOG\n", id="pipefail after an assignment"),
        pytest.param(
            "sbatch <<END\n#!/bin/bash\n#SBATCH --job-name=$1 --time=1:00:00\nsrun python train.py\nEND\n",
            id="an argument in a here-document",
        ),
        pytest.param(f"{_ONE}srun --pty docker run -it torch python train.py\n", id="docker with a terminal of srun"),
        pytest.param(f'{_ONE}RUN=(LR=1 {_ALONE})\nenv "${{RUN[@]}}"\n', id="assignments for env"),
        pytest.param(f"{_ONE}RUN='LR=1 {_ALONE}'\neval $RUN\n", id="assignments for eval"),
    ],
)
def test_a_good_script_gets_no_more_than_hints(script: str) -> None:
    assert [
        (each.rule.code, each.what) for each in lint("job.sh", script.encode()) if each.rule.severity != "hint"
    ] == []


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        (f"{_ONE}{_ALONE} | tee log.txt\n", ("AR701", 6)),
        (f"{_ONE}set -e\n{_ALONE} | tee log.txt\necho done\n", ("AR701", 7)),
        (f"{_ONE}{_ALONE} | tee log.txt && echo done\n", ("AR701", 6)),
        (
            f"{_TWO}export MASTER_ADDR=$(scontrol show hostnames '$SLURM_JOB_NODELIST')\nsrun python a.py\n",
            ("AR207", 6),
        ),
        (f"{_TWO}LR=1\nREST='--lr $LR'\nsrun python train.py $REST\n", ("AR207", 8)),
        (f"{_ONE}export NCLL_DEBUG=INFO\n{_ALONE}\n", ("AR503", 6)),
        (f"{_ONE}RUN=(LR=1 {_ALONE})\n${{RUN[@]}}\n", ("AR218", 7)),
        (f"{_ONE}RUN='LR=1 {_ALONE}'\n$RUN\n", ("AR218", 7)),
        (f"{_ONE}{_ALONE}\nsleep 600\n", ("AR715", 7)),
        ("#!/bin/bash\n#SBATCH --nodes=2 --ntasks=1\n#SBATCH --time=1:00:00\nsrun python train.py\n", ("AR419", 2)),
        (f"{_ONE}export CUDA_LAUNCH_BLOCKING=1\nsrun ./train.sh\n", ("AR507", 6)),
        (f"{_ONE}srun docker run --rm --gpus all -ti torch python train.py\n", ("AR433", 6)),
        (f'{_ONE}bash -c "torchrun --standalone \\\\ \n  --nproc-per-node=4 train.py"\n', ("AR202", 7)),
        (f"{_ONE}nohup LR=1 {_ALONE}\n", ("AR218", 6)),
        ("sbatch <<END\n\n#SBATCH --time=1:00:00\nsrun python train.py\nEND\n", ("AR403", 3)),
    ],
)
def test_what_is_like_them_and_a_fault_is_found(script: str, fault: tuple[str, int]) -> None:
    assert fault in {(each.rule.code, each.place.line) for each in lint("job.sh", script.encode())}


def test_a_line_that_is_cut_off_is_the_one_fault() -> None:
    script = f"{_TWO}srun torchrun --nnodes=2 \\ # nodes\n--nproc-per-node=4 train.py\n"
    found = lint("job.sh", script.encode())
    assert [(each.rule.code, each.place.line) for each in found if each.rule.severity != "hint"] == [("AR202", 7)]
