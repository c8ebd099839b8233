"""``allranks convert --verify``: scripts of all kinds, run by recorders in the sandbox, start what their jobs start."""

# ruff: noqa: E501 - scripts as they are written

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from allranks.cli import convert
from allranks.convert import sandbox, write
from allranks.convert.recorder.main import COMMANDS, mpirun
from allranks.errors import LaunchError, UsageError
from allranks.lint.model import MPI

HERE = Path(__file__).parent
_WORDS = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "true"]
pytestmark = pytest.mark.skipif(
    subprocess.run(_WORDS, check=False, capture_output=True).returncode != 0, reason="namespaces cannot be made here"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory in which the commands are typed, with what the scripts name."""
    home = tmp_path / "home"
    work = home / "work"
    for each in (work, work / "project", work / "sub"):
        each.mkdir(parents=True)
        (each / "train.py").touch()
        (each / "prepare.py").touch()
    (home / "train.py").touch()
    (work / "hosts.txt").write_text("gpu1\ngpu2\n")
    (work / "slots.txt").write_text("gpu1 slots=4\ngpu2 slots=4\n")
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    for name in [each for each in os.environ if each.startswith(("SLURM_", "PBS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return work


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

#: A script, by what is special about it; with the files beside it where there are some.
SCRIPTS: dict[str, str | tuple[str, dict[str, str]]] = {
    # One machine
    "torchrun": "torchrun --standalone --nproc-per-node=2 train.py --lr 0.1\n",
    "torchrun with underscores": "torchrun --standalone --nproc_per_node 3 train.py\n",
    "python": "python train.py --epochs 3\n",
    "python -u": "python3 -u -W ignore train.py\n",
    "python -m": "python -m project.train --lr 0.1\n",
    "python -m torch.distributed.run": "python -m torch.distributed.run --standalone --nproc-per-node=2 train.py a\n",
    "torch.distributed.launch": "python -m torch.distributed.launch --use_env --nproc_per_node=2 train.py a\n",
    "torch.distributed.launch without --use_env": "python -m torch.distributed.launch --nproc_per_node=2 train.py a\n",
    "torchrun -m": "torchrun --standalone --nproc-per-node=2 -m project.train --x 1\n",
    "torchrun --no-python": "torchrun --standalone --nproc-per-node=2 --no-python bash -c 'exec python train.py $RANK'\n",
    "accelerate": "accelerate launch --num_processes 4 --mixed_precision bf16 train.py --lr 0.1\n",
    "accelerate with a file": (
        "accelerate launch --config_file cfg.yaml train.py\n",
        {"cfg.yaml": "num_machines: 1\nnum_processes: 2\nmixed_precision: fp16\n"},
    ),
    "deepspeed": "deepspeed --num_gpus 4 train.py --deepspeed ds.json\n",
    "quotes and spaces": "torchrun --standalone --nproc-per-node=2 train.py --name 'two words' \"it's\" a\\ b ''\n",
    "an array of arguments": 'ARGS=(--a "b c" --d)\ntorchrun --standalone --nproc-per-node=2 train.py "${ARGS[@]}"\n',
    "arguments in a string": 'ARGS="--lr 0.1 --epochs 3"\ntorchrun --standalone --nproc-per-node=2 train.py $ARGS\n',
    "arithmetic": "N=2\nexport BATCH=$((64 / N))\ntorchrun --standalone --nproc-per-node=$N train.py --batch $BATCH\n",
    "a function": "launch() {\n  torchrun --standalone --nproc-per-node=2 train.py --x 1\n}\nlaunch\n",
    "variables before the command": "A=1 B='x y' torchrun --standalone --nproc-per-node=2 train.py\n",
    "env and nohup": "nohup env OMP_NUM_THREADS=4 torchrun --standalone --nproc-per-node=2 train.py > log 2>&1 &\n",
    "numactl": "numactl --cpunodebind=0 torchrun --standalone --nproc-per-node=2 train.py\n",
    "a directory": "cd project && torchrun --standalone --nproc-per-node=2 train.py\n",
    "a directory of the script": 'cd "$(dirname "$0")"\ntorchrun --standalone --nproc-per-node=2 train.py\n',
    "a virtual environment": "source venv/bin/activate\nexport X=1\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "a virtual environment elsewhere": ". /opt/env/bin/activate\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "an interpreter by its path": "/opt/env/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 train.py\n",
    "torchrun by its path": "~/env/bin/torchrun --standalone --nproc-per-node=2 train.py\n",
    "conda": 'eval "$(conda shell.bash hook)"\nconda activate mine\ntorchrun --standalone --nproc-per-node=2 train.py\n',
    "a sourced file": (
        "source ./env.sh\ntorchrun --standalone --nproc-per-node=$N train.py --data $DATA\n",
        {"env.sh": "export DATA=/data\nN=2\n"},
    ),
    "the start file of the shell": "source ~/.bashrc\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "options by their beginnings": "torchrun --nnode 1 --nproc_per 2 --master_po 29511 train.py --lr 1\n",
    "modules that are loaded twice": f"{ONE}module load cuda\nmodule load cuda\ntorchrun --standalone --nproc-per-node=4 train.py\n",
    "a script that runs a script": (
        "./run.sh --lr 0.1\n",
        {"run.sh": '#!/bin/bash\ntorchrun --standalone --nproc-per-node=2 train.py "$@"\n'},
    ),
    "one node of two": f"torchrun {STATIC} --node-rank=1 train.py\n",
    "a preparation": "python prepare.py --to /data\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "a machine of two, by the argument of the script": "export NODE=$1\naccelerate launch --multi_gpu --num_machines 2 --num_processes 8 --machine_rank $NODE --main_process_ip gpu1 --main_process_port 29500 train.py\n",
    "arguments of functions": 'train() {\n  local lr=$1\n  shift\n  torchrun --standalone --nproc-per-node=2 train.py --lr $lr "$@"\n}\nall() { train $2 --name "$1"; }\nall "a b" 0.1\n',
    "paths beside the script": (
        "bash sub/run.sh\n",
        {
            "sub/run.sh": 'HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nROOT=$(dirname "$HERE")\nexport PYTHONPATH=$ROOT:$PYTHONPATH\ntorchrun --standalone --nproc-per-node=2 "$(dirname "$0")/train.py" --config "$HERE/a.yaml" --out $(pwd)/out\n'
        },
    ),
    "a configuration that it writes": "LR=0.1\nNAME=conf\ncat > $NAME.yaml <<EOF\nlr: $LR\nEOF\necho 3 > seed.txt\ntorchrun --standalone --nproc-per-node=2 train.py --config $NAME.yaml --seed-file=seed.txt\n",
    "a program below a directory that is not known": "PYTHON=${HOME}/env/bin/python\nmpirun -np 2 ${PYTHON} train.py --epochs 5\n",
    "defaults of variables": 'GPUS=${GPUS:-2}\nLR=${LR:-0.1}\ntorchrun --standalone --nproc_per_node=$GPUS train.py --lr $LR --seed ${SEED:-3} --name "${1:-x}"\n',
    "csh": "#!/bin/tcsh\nsource /etc/profile.d/modules.csh\nset lr = 0.1\nsetenv A 1\nsetenv B 'x y'\nif ( ! $?C ) setenv C $lr\ntorchrun --standalone --nproc-per-node=2 train.py --lr $lr\n",
    "a directory of the script in a variable of the command": 'PYTHONPATH="$(dirname $0)/..":$PYTHONPATH \\\ntorchrun --standalone --nproc-per-node=2 train.py\n',
    "a directory of the script in a variable": "export PYTHONPATH=$(dirname $0)/..:$PYTHONPATH\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    # Slurm
    "defaults of an srun outside of a job": "PARTITION=${PARTITION:-video}\nGPUS=${GPUS:-8}\nGPUS_PER_NODE=${GPUS_PER_NODE:-4}\nsrun -p $PARTITION --gres=gpu:$GPUS_PER_NODE --ntasks=$GPUS --ntasks-per-node=$GPUS_PER_NODE ${SRUN_ARGS} python train.py --lr 0.1\n",
    "srun torchrun": f"{SLURM}{HEAD}srun torchrun {C10D} train.py --lr 0.1\n",
    "srun torchrun, with its faults": f"{SLURM}{HEAD}srun torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$SLURM_NODEID --master-addr=$MASTER_ADDR train.py\n",
    "srun bash -c": f"{SLURM}export {HEAD}srun bash -c 'torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$SLURM_NODEID --master-addr=$MASTER_ADDR train.py'\n",
    "srun python": f"{SLURM.replace('per-node=1', 'per-node=4')}export {HEAD}export MASTER_PORT=29500\nsrun python train.py --lr 0.1\n",
    "srun with options": f"{SLURM}{HEAD}srun --nodes=2 --ntasks=2 --cpu-bind=none torchrun {C10D} train.py\n",
    "modules and conda": f"{SLURM}module load cuda/12.4 nccl\nconda activate mine\n{HEAD}srun torchrun {C10D} train.py\n",
    "variables of a batch": f'{SLURM}export NCCL_DEBUG=INFO\nexport DATA="/data/my set"\n{HEAD}srun torchrun {C10D} train.py --data "$DATA"\n',
    "a launcher in a variable": f'{SLURM}{HEAD}LAUNCHER="torchrun {C10D}"\nsrun $LAUNCHER train.py\n',
    "a script of each node": (
        f"{SLURM}export {HEAD}srun bash node.sh 4\n",
        {
            "node.sh": "export A=1\ntorchrun --nnodes=2 --nproc-per-node=$1 --node-rank=$SLURM_NODEID --master-addr=$MASTER_ADDR train.py\n"
        },
    ),
    "a loop of srun": f'{SLURM}nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))\nfor i in 0 1; do\n  srun --nodes=1 --ntasks=1 -w "${{nodes[$i]}}" torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$i --master-addr=${{nodes[0]}} --master-port=29500 train.py &\ndone\nwait\n',
    "one node of Slurm": f"{ONE}torchrun --standalone --nproc-per-node=4 train.py\n",
    "an array": f"{ONE}#SBATCH --array=0-3\ntorchrun --standalone --nproc-per-node=4 train.py --seed $SLURM_ARRAY_TASK_ID\n",
    "an item for each task of an array": f"{ONE}#SBATCH --array=0-2\nLRS=(0.1 0.2 0.3)\nLR=${{LRS[$SLURM_ARRAY_TASK_ID]}}\nsrun torchrun --standalone --nproc-per-node=4 train.py --lr $LR\n",
    "a case for each task of an array": f"{ONE}#SBATCH --array=0-2\ncase $SLURM_ARRAY_TASK_ID in\n  0) ARGS=(--a 'b c');;\n  *) ARGS=(--b);;\nesac\ntorchrun --standalone --nproc-per-node=4 train.py \"${{ARGS[@]}}\"\n",
    "a condition on the task of an array": f"{ONE}#SBATCH --array=0-2\nif [ $SLURM_ARRAY_TASK_ID -eq 0 ]; then\n  LR=0.1\nelse\n  LR=0.2\nfi\nsrun torchrun --standalone --nproc-per-node=4 train.py --lr $LR\n",
    "a date": "NOW=$(date +%F)\nOUT=/out/$NOW\ntorchrun --standalone --nproc-per-node=2 train.py --out $OUT --name a-$NOW --log $OUT/log\n",
    "a date of a batch": f"{SLURM}{HEAD}NOW=`date +%s`\nsrun torchrun {C10D} train.py --out $NOW\n",
    "an option if a variable is set": 'RESUME="${RESUME:-latest}"\ntorchrun --standalone --nproc-per-node=2 train.py --lr 1 ${RESUME:+--resume "$RESUME"}\n',
    "a port that is looked for": "while true; do\n  PORT=$((RANDOM % 1000 + 20000))\n  nc -z 127.0.0.1 $PORT || break\ndone\ntorchrun --nproc-per-node=2 --master-port=$PORT train.py\n",
    "modules where unset variables are errors": f"{ONE}set -euo pipefail\nmodule load cuda\ntorchrun --standalone --nproc-per-node=4 train.py\n",
    "a directory to be removed": 'NOW=`date +%F`\nif [ -z "$NAME" ]; then\n  OUT=runs/$NOW\nelse\n  OUT=runs/$NAME\nfi\nif [ -d "$OUT" ]; then rm -rf "$OUT"; fi\ntorchrun --standalone --nproc-per-node=2 train.py\n',
    "a line of a file for each task of an array": (
        f'{ONE}#SBATCH --array=0-2\nLINE=$(sed -n "$((SLURM_ARRAY_TASK_ID + 2))p" hosts.txt)\ntorchrun --standalone --nproc-per-node=4 train.py --name "$LINE"\n',
        {},
    ),
    "a container of srun, and a log": f'{SLURM.replace("per-node=1", "per-node=4")}DIR=`pwd`\nDATE=today\nsrun -l --container-image nvcr.io/x --output=$DIR/%x_%j_$DATE.log sh -c "python -u ${{DIR}}/train.py --lr 1"\n',
    "a container": f"{ONE}srun apptainer exec --nv image.sif torchrun --standalone --nproc-per-node=4 train.py\n",
    "a directory of a batch": f"{ONE}cd $SLURM_SUBMIT_DIR/project\ntorchrun --standalone --nproc-per-node=4 train.py\n",
    "accelerate on two nodes": f"{SLURM}export {HEAD}srun bash -c 'accelerate launch --num_processes 8 --num_machines 2 --machine_rank $SLURM_PROCID --main_process_ip $MASTER_ADDR --main_process_port 29500 train.py'\n",
    "python by its path in srun": f"{SLURM.replace('per-node=1', 'per-node=4')}srun /opt/env/bin/python -u train.py\n",
    "a port of Python": f"{SLURM}{HEAD}PORT=$(python -c 'import socket; print(29500)')\nsrun torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$PORT train.py\n",
    # PBS and Grid Engine
    "pbs": f"{PBS.replace('select=2', 'select=1')}torchrun --standalone --nproc-per-node=4 train.py\n",
    "pbs and mpiexec": f"{PBS}HEAD=$(head -n1 $PBS_NODEFILE)\nmpiexec -n 2 --ppn 1 torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500 train.py\n",
    "pbs and ranks of mpirun": f"{PBS}mpirun -np 8 --map-by ppr:4:node python train.py\n",
    "pbs and ranks of mpiexec on Cray": f"{PBS}mpiexec -n 8 --ppn 4 --depth=8 --cpu-bind depth --env NCCL_DEBUG=INFO --env=A=1 python train.py\n",
    "pbs and ranks of Hydra": f"{PBS}mpirun -n 8 -ppn 4 -genv NCCL_DEBUG INFO -env A=1 python train.py\n",
    "an option of mpirun with one dash": "mpirun -np 2 -output-filename logs/out python train.py\n",
    "accelerate whose nodes are numbered when they meet": f'{SLURM}export {HEAD}LAUNCH="accelerate launch --num_processes 8 --num_machines 2 --rdzv_backend c10d --machine_rank $SLURM_NODEID --main_process_ip $MASTER_ADDR --main_process_port 29500"\nsrun $LAUNCH train.py\n',
    "a variable that is exported further down": "NAME=$(basename $PWD)\nexport NAME\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "an alert if the training fails": 'python train.py --lr 1\nif [ $? -ne 0 ]; then python prepare.py "failed"; fi\n',
    "an environment that a preparation needs too": f"{ONE}source venv/bin/activate\nprepare_data --all\nsrun python train.py\n",
    "a program before python": f"{ONE.replace('per-node=1', 'per-node=4')}srun ./set_gpu.sh python train.py\n",
    "a container with a variable": f"{ONE}srun apptainer exec --nv --bind /data/of/the/project:/data --bind /scratch/of/the/group:/scratch --bind /software/of/the/group:/software --bind /models:/models --bind /results:/results --env CACHE=/scratch/$USER image.sif torchrun --standalone --nproc-per-node=4 train.py\n",
    "an environment of conda whose name is not known": 'ENV=$(basename $PWD)\nconda run -n "$ENV" torchrun --standalone --nproc-per-node=2 train.py\n',
    "a backslash at the end": "torchrun --standalone --nproc-per-node=2 train.py --lr 0.1 \\\n",
    "files that are sourced and are not here": "source settings_here.sh\n. .env\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "a log in a directory that is not here": "RUN=a\ntorchrun --standalone --nproc-per-node=2 train.py > logs/$RUN/train.log 2>&1\n",
    "a log of a block": "{\n  torchrun --standalone --nproc-per-node=2 train.py\n} > logs/train.log 2> logs/train.err\n",
    "GPUs that are counted": "torchrun --standalone --nproc-per-node=$(nvidia-smi -L | wc -l) train.py\n",
    "a home that the shell expands": 'A=~/a\nB="~/b"\nC=$A/c\nD=${DATA_OF_NOBODY:-~/d}\nexport E=~/e\nexport F=\'~/f\'\npython train.py $A "$A" $B $C $D ~ ~/g \'~/h\' --i=~/i "~"/j\n',
    "a directory in a variable that a shell runs": f'{ONE}CMD="cd project"\nCMD="$CMD && python train.py"\nsrun bash -c "$CMD"\n',
    "a rank of the node from outside": f"torchrun {STATIC} --node-rank=${{NODE_OF_MINE}} train.py\n",
    "a preparation in the background that is waited for": "python prepare.py &\nwait\npython train.py\n",
    "a module of deepspeed": "deepspeed --num_gpus=2 --no_local_rank -m project.train --lr 1\n",
    "a node by its name": f"{ONE}#SBATCH --nodelist=gpu[7-9]\nsrun torchrun --standalone --nproc-per-node=4 train.py\n",
    "a word in pieces": "python train.py data='a:'\\\n'b:'\\\n\"c d\" --x\n",
    "variables that are printed": f"{ONE}env | grep -i nothing_has_this\nexport PATH=$PATH:/opt/of/mine/bin\nsrun torchrun --standalone --nproc-per-node=4 train.py\n",
    "a version of python": f"{ONE}module load python/3.11\nsrun python3.11 train.py\n",
    "mpirun in a container": "singularity exec --nv image.sif mpirun --oversubscribe --host localhost:3 -n 3 python train.py\n",
    "srun in an environment": f"{ONE}poetry run srun torchrun --standalone --nproc-per-node=4 train.py\n",
    "fewer tasks than fit": f"{SLURM.replace('per-node=1', 'per-node=4')}srun --ntasks=4 --ntasks-per-node=4 python train.py\n",
    "a range of nodes in a job of one": f"{ONE}torchrun --nnodes=1:2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=localhost:6000 train.py\n",
    "a limit that is higher than that here": "set -e\nulimit -n 1000000\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "another branch": 'N=$(nvidia-smi -L | wc -l)\nif [ "$N" -eq 900 ]; then\n  python prepare.py\n  export A=1\nelse\n  torchrun --standalone --nproc-per-node=2 train.py\nfi\n',
    "trainings at the same time": "python train.py --seed 1 &\npython train.py --seed 2 &\nwait\n",
    "grid engine": f"{GRID}torchrun --standalone --nproc_per_node=2 train.py --data /data\n",
    # Machines
    "ssh in a loop": f'i=0\nfor host in gpu1 gpu2; do\n  ssh $host "cd {{work}} && torchrun {STATIC} --node-rank=$i train.py" &\n  i=$((i + 1))\ndone\nwait\n',
    "ssh with hosts of a file": f'i=0\nfor host in $(cat hosts.txt); do\n  ssh $host "cd {{work}} && A=1 torchrun {STATIC} --node-rank=$i train.py" &\n  i=$((i + 1))\ndone\nwait\n',
    "pdsh": "pdsh -w gpu[1-2] 'cd {work}; torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=gpu1:29500 train.py'\n",
    "mpirun with hosts": "mpirun -np 8 -H gpu1:4,gpu2:4 -x NCCL_DEBUG=INFO python train.py\n",
    "deepspeed with a file of hosts": "deepspeed --hostfile slots.txt --num_gpus 4 train.py --deepspeed\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_job_starts_what_its_script_started(folder: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    given = SCRIPTS[name]
    script, files = given if isinstance(given, tuple) else (given, {})
    for beside, text in files.items():
        (folder / beside).write_text(text)
        (folder / beside).chmod(0o755)
    (folder / "start.sh").write_text(script.replace("{work}", str(folder)))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code = typed("start.sh")
    said = capfd.readouterr()
    assert "start.sh: verified: " in said.err, said.err
    assert "DIFFERS" not in said.err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert code == 0, said.err


@pytest.mark.parametrize("line", ["source ~/envs/torch/bin/activate", "source activate myenv", ""])
def test_the_environment_of_the_terminal_changes_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """``python`` and ``activate`` are first on PATH in the one that allranks is in, as ``pip install`` leaves it."""
    active = folder.parent / "active"
    (active / "bin").mkdir(parents=True)
    (active / "bin/activate").write_text(f"export VIRTUAL_ENV={active} PATH={active}/bin:$PATH\n")
    (active / "bin/python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(active / "bin/python"))
    monkeypatch.setenv("VIRTUAL_ENV", str(active))
    monkeypatch.setenv("PATH", f"{active}/bin:{os.environ['PATH']}")
    (folder / "start.sh").write_text(f"{line}\n{TRAIN}")
    code = typed("start.sh")
    said = capfd.readouterr().err
    assert "DIFFERS" not in said
    assert "start.sh: verified: 2 ranks, alike in " in said
    assert code == 0


OWN = {
    "by number": (
        'if [ $# -lt 2 ]; then exit 1; fi\nLR=$1\nexport NAME=$2\ntorchrun --standalone --nproc-per-node=2 train.py --lr $LR --name "$2" --seed ${3:-7}\n',
        ["0.1", "a b", "9"],
    ),
    "all but the first ones": (
        "CFG=$1\nGPUS=$2\ntorchrun --standalone --nproc-per-node=$GPUS train.py $CFG ${@:3}\n",
        ["c.py", "2", "--x", "3"],
    ),
    "all after a shift": (
        'GPUS=$1\nshift\ntorchrun --standalone --nproc-per-node=$GPUS train.py "$1" "$@"\n',
        ["2", "--x", "3"],
    ),
    "of a batch": (f'{ONE}srun torchrun --standalone --nproc-per-node=$1 train.py "$@"\n', ["4", "--x"]),
}


@pytest.mark.parametrize("name", OWN)
def test_arguments_of_the_script_are_given_behind_hyphens(
    folder: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    script, arguments = OWN[name]
    (folder / "start.sh").write_text(script)
    code = convert.command.main(["start.sh", "--verify", "--", *arguments], standalone_mode=False)
    said = capfd.readouterr().err
    assert "start.sh: verified: " in said, said
    assert "rank, local rank, world size and host" in said
    assert "arguments" in said.partition("start.sh: verified: ")[2].partition("\n")[0]
    assert "not taken over" not in said
    assert "was read without" not in said
    assert code == 0


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        (
            "if [ $# -lt 2 ]; then exit 1; fi\nLR=$1\ntorchrun --standalone train.py --lr $LR --name $2 --seed ${3:-7}\n",
            2,
        ),
        ("CFG=${1:?which one}\ntorchrun --standalone train.py $CFG\n", 1),
        ("A=$1\nshift\ntorchrun --standalone train.py $A $1\n", 2),
        ("run() { python train.py $1; }\nrun a\ntorchrun --standalone train.py ${1:-a}\n", 0),
    ],
)
def test_arguments_that_the_script_is_run_without_are_named(
    folder: Path, capfd: pytest.CaptureFixture[str], script: str, missing: int
) -> None:
    (folder / "start.sh").write_text(script)
    typed("start.sh")
    found = capfd.readouterr().err.splitlines()
    notes = [line for line in found if "was read without" in line or line.startswith("  fix: ")]
    values = " ".join(f"VALUE{number}" for number in range(1, missing + 1))
    names = " and ".join(f"${number}" for number in range(1, missing + 1))
    assert (
        notes
        == [
            f"note: start.sh was read without its arguments {names}",
            f"  fix: allranks convert start.sh --verify -- {values}",
        ][: 2 * bool(missing)]
    )


CAUSES = {
    "an argument": (
        'if [ -z "$1" ]; then echo usage; exit 1; fi\npython train.py $1\n',
        "the script starts no rank without its arguments $1",
        "",
    ),
    "an argument that is the program": (
        "python $1/train.py\n",
        "the script was run without its arguments $1",
        "",
    ),
    "a variable that the script asks for": (
        "echo $OTHER_OF_NOBODY\n: ${DATA_OF_NOBODY:?where is it}\npython train.py\n",
        "the script ended before its training: its last output is start.sh: line 2: DATA_OF_NOBODY: where is it; it reads "
        "DATA_OF_NOBODY, which is set neither in it nor here",
        "DATA_OF_NOBODY=VALUE allranks convert start.sh --verify",
    ),
    "a variable that is not bound": (
        "set -u\ntorchrun --standalone --nproc-per-node=$COUNT_OF_NOBODY train.py\n",
        "the script ended before its training: its last output is start.sh: line 2: COUNT_OF_NOBODY: unbound variable; it "
        "reads COUNT_OF_NOBODY, which is set neither in it nor here",
        "COUNT_OF_NOBODY=VALUE allranks convert start.sh --verify",
    ),
    "a file of accelerate": (
        "python prepare.py\naccelerate launch --config_file conf/a.yaml train.py\n",
        "the script needs the file WORK/conf/a.yaml, which is not here",
        "put it there, and convert start.sh again",
    ),
    "a file of accelerate, with the errors sent elsewhere": (
        "nohup accelerate launch --config_file conf/a.yaml train.py > log.txt 2>&1 &\n",
        "the script needs the file of accelerate --config_file conf/a.yaml, which is not here",
        "put it there, and convert start.sh again",
    ),
    "another branch": (
        'if [ "${HOW:-}" = "" ]; then\n  python prepare.py\nelse\n  echo $HOW\n  torchrun --standalone train.py\nfi\n',
        "here the script starts WORK/prepare.py, and not the training, which is under a condition",
        "",
    ),
    "a place holder": (
        "A=1\nDATA=<the path>\necho $A\ntorchrun --standalone train.py\n",
        "bash cannot read the script: line 2: syntax error near unexpected token `newline'",
        "bash -n start.sh shows more",
    ),
    "the allocation that it is run in": (
        "srun -n 2 -c$SLURM_CPUS_PER_TASK -o log.txt python train.py\n",
        "the script reads SLURM_CPUS_PER_TASK, which only jobs of a scheduler have, and is none",
        "",
    ),
    "a script": (
        "mpirun -np 2 bash steps/wrap.sh python train.py\n",
        "the script runs WORK/steps/wrap.sh, which is not here",
        "put it there, and convert start.sh again",
    ),
    "what set -x does not hide": (
        "set -x\necho 'no data'\nexit 1\ntorchrun --standalone train.py\n",
        "the script ended before its training: its last output is no data",
        "",
    ),
    "a variable of Slurm": (
        f"{ONE}set -e\nN=$(expr 2 \\* $SLURM_NTASKS_PER_GPU)\ntorchrun --standalone --nproc-per-node=$N train.py\n",
        "the script ended before its training: its last output is expr: syntax error: missing argument after '*'; it reads "
        "SLURM_NTASKS_PER_GPU, which is set neither in it nor here",
        "",
    ),
    "a line of the set-up": (
        "echo made && rm made_by_hand.txt\ntorchrun --standalone --nproc-per-node=2 train.py\n",
        "a line of the set-up fails in the sandbox, and the script went on: rm made_by_hand.txt (exit code 1)",
        "",
    ),
    "something else": (
        "echo 'no data'\nexit 1\ntorchrun --standalone train.py\n",
        "the script ended before its training: its last output is no data",
        "",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_why_a_script_starts_no_rank_is_named(folder: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    script, cause, fix = CAUSES[name]
    (folder / "$1").mkdir()
    (folder / "$1/train.py").touch()
    (folder / "start.sh").write_text(script)
    assert typed("start.sh", "--json") == 1
    said = capfd.readouterr()
    cause = cause.replace("WORK", str(folder))
    assert f"start.sh: not verified: {cause}\n" in said.err
    assert [each["cause"] for each in json.loads(said.out)["scripts"]] == [cause]
    assert not fix or f"\n  fix: {fix}\n" in said.err


def test_what_runs_beside_the_training_is_no_line_of_the_setup(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "start.sh").write_text("python prepare.py --serve &\npython train.py\n")
    assert typed("start.sh") == 0
    said = capfd.readouterr()
    assert "setup" not in said.out
    what = "not taken over: python prepare.py --serve: it runs beside the training: start it by hand"
    assert f"  wanted: another command: {folder}/prepare.py --serve -> nothing\n    {what}\n" in said.err


def test_a_variable_of_a_loop_before_a_launcher_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "start.sh").write_text(
        "for seed in 1 2; do\n  SEED=$seed torchrun --standalone --nproc-per-node=2 train.py\ndone\n"
    )
    assert typed("start.sh") == 1
    said = capfd.readouterr()
    assert "SEED=$seed" not in said.out.partition("# Not taken over")[0]
    what = "SEED=$seed: its value is not in the script; write it into environment.variables"
    assert f"start.sh:2: {what}\n" in said.out + said.err


def test_a_default_that_is_not_known_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "start.sh").write_text(
        "TO=${OUT_OF_NOBODY:-$(mktemp)/a}\n: ${DIR_OF_NOBODY:=$PWD/b}\npython train.py --to $TO --dir $DIR_OF_NOBODY\n"
    )
    assert typed("start.sh") == 1
    said = capfd.readouterr().err
    assert "start.sh:3: $OUT_OF_NOBODY: its default is not known here; write its value into args\n" in said
    assert "start.sh:3: $DIR_OF_NOBODY: its value is not in the script; write it into args\n" in said
    assert "DIFFERS" not in said


def test_a_launcher_below_a_directory_that_is_not_known_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "start.sh").write_text("$(dirname $(mktemp))/bin/torchrun --standalone --nproc-per-node=2 train.py\n")
    typed("start.sh")
    assert "/bin/torchrun: environment.python expands no variables\n" in capfd.readouterr().err


CHANGES = {
    "an argument": ('args: ["--lr", "0.1"]', 'args: ["--lr", "0.2"]', "arguments of rank 0: --lr 0.1 -> --lr 0.2"),
    "ranks": ("nproc_per_node: 2", "nproc_per_node: 3", "ranks: 2 of 2 (HOST: 0 1) -> 3 of 3 (HOST: 0 1 2)"),
    "a variable": ('A: "1"', 'A: "2"', "variable A: 1 -> 2"),
    "a variable that is missing": ('    A: "1"', '    B: "1"', "variable A: 1 -> nothing"),
    "the script": (
        "script: train.py",
        "script: prepare.py",
        "program of rank 0: script WORK/train.py -> script WORK/prepare.py",
    ),
    "the interpreter": (
        "python: [/opt/env/bin/python]",
        "python: [/opt/b/bin/python]",
        "interpreter of rank 0: /opt/env/bin/python -> /opt/b/bin/python",
    ),
    "the working directory": (
        "script: train.py",
        "script: train.py\nworkdir: sub",
        "working directory of rank 0: WORK -> WORK/sub",
    ),
    "a command before": (
        "prepare.py --to a",
        "prepare.py --to b",
        "another command: WORK/prepare.py --to a -> nothing",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_job_that_starts_something_else_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    old, new, said = CHANGES[name]
    script = (
        "export A=1\npython prepare.py --to a\n"
        "/opt/env/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 train.py --lr 0.1\n"
    )
    (folder / "start.sh").write_text(script)
    written = write.job_text

    def changed(*given: Any) -> str:
        text = "\n".join(line.partition("  # ")[0] for line in written(*given).splitlines())
        assert old in text
        return text.replace(old, new)

    monkeypatch.setattr(write, "job_text", changed)
    assert typed("start.sh") == 1
    expected = said.replace("HOST", socket.gethostname()).replace("WORK", str(folder))
    assert f"\n  DIFFERS: {expected}\n" in capfd.readouterr().err


def test_a_job_for_another_number_of_nodes_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "start.sh").write_text(f"{SLURM}{HEAD}srun torchrun {C10D} train.py\n")
    written = write.job_text
    monkeypatch.setattr(write, "job_text", lambda *given: written(*given).replace("nodes: 2", "nodes: 3"))
    assert typed("start.sh") == 1
    said = "DIFFERS: ranks: 8 of 8 (node01: 0 1 2 3, node02: 4 5 6 7) -> 12 of 12 (node01: 0 1 2 3, node02: 4 5 6 7, node03"
    assert said in capfd.readouterr().err


def test_what_is_wanted_is_explained(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        "export WANDB_API_KEY=abcdefghijklmnop\nexport NNODES=1\ntorchrun --standalone --nproc-per-node=2 train.py\n"
    )
    (folder / "start.sh").write_text(script)
    assert typed("start.sh") == 0
    said = capfd.readouterr().err
    assert "  wanted: variable WANDB_API_KEY: <secret> -> <secret>\n    its value comes from where you type" in said
    assert "  wanted: variable NNODES: 1 -> nothing\n    left out: NNODES=1: allranks sets what the ranks need" in said
    assert "  wanted: address and port: localhost:29500 -> chosen when it starts\n" in said
    assert "abcdefghijklmnop" not in said


def test_other_ranks_are_explained_by_a_fault_of_ranks(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not by the first fault of the script, whatever it is: here a secret, and a process that is killed by its name."""
    head = SLURM.replace("tasks-per-node=1", "tasks-per-node=4")
    script = f"{head}export WANDB_API_KEY=0123456789abcdef\npkill python\n{HEAD}srun torchrun {C10D} train.py\n"
    (folder / "start.sh").write_text(script)
    assert typed("start.sh") == 0
    said = capfd.readouterr().err.splitlines()
    (at,) = (at for at, line in enumerate(said) if line.startswith("  wanted: ranks: 32 of 8 "))
    assert said[at + 1] == "    AR102: srun starts 4 times torchrun on each node, and each of them starts 4 ranks"


def test_each_of_several_scripts_is_compared_with_its_flags(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = f"{SLURM}{HEAD}srun torchrun {C10D} train.py\n"
    (folder / "small.sbatch").write_text(script)
    (folder / "large.sbatch").write_text(script.replace("nodes=2", "nodes=3"))
    assert typed("small.sbatch", "large.sbatch") == 0
    said = capfd.readouterr().err
    assert "small.sbatch: verified: 8 ranks" in said
    assert "large.sbatch: verified: 12 ranks" in said


def test_without_a_sandbox_nothing_is_run(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    unshare = tmp_path / "bin" / "unshare"
    unshare.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    unshare.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (folder / "start.sh").write_text("touch made\ntorchrun --standalone --nproc-per-node=2 train.py\n")
    with pytest.raises(LaunchError, match="runs no script without one") as raised:
        typed("start.sh")
    assert raised.value.why == "unshare: unshare failed: Operation not permitted"
    assert not (folder / "made").exists()


TRAIN = "torchrun --standalone --nproc-per-node=2 train.py\n"
#: Scripts that would do harm. None takes longer than the limits of the sandbox.
HOSTILE = {
    "rm of all": 'rm -rf "$HOME"; rm -rf /etc /home /var 2>/dev/null\n',
    "rm by its path": "/bin/rm -rf {work} {home}\n",
    "an endless loop": "while true; do :; done\n",
    "loops that ignore signals": "trap '' TERM INT HUP\n(while true; do :; done) & (while true; do :; done) & wait\n",
    "a fork bomb": ":(){ :|:& };:\n",
    "a huge file": "head -c 100G /dev/zero > huge\nyes > {home}/yes\n",
    "many files": "mkdir many; for i in $(seq 100000); do : > many/$i; done\n",
    "memory": "x=$(yes)\n",
    "endless output": "yes\n",
    "writing beside it": "echo bad > train.py; echo bad > {home}/train.py; mv hosts.txt x; chmod 0 slots.txt\n",
    "writing by a link": "ln -s {home} link; echo bad > link/train.py; ln -sf /etc/passwd p; echo x >> p\n",
    "a program of the user": "chmod +x evil; ./evil; {work}/evil; exec ./evil\n",
    "an interpreter": 'perl -e \'unlink "train.py"\'; python -c \'open("made", "w")\'; /.allranks/python/bin/python3 -c \'open("{work}/made", "w")\'\n',
    "the loader": "/lib64/ld-linux-x86-64.so.2 {work}/evil\n",
    "mounting": "mount -o remount,rw /; umount -l {work}; /.allranks/python/bin/python3 -c 'import ctypes; print(ctypes.CDLL(None).umount2(b\"{work}\", 2))'\n",
    "killing": "kill -9 -1\n",
    "devices": "echo x > /dev/sda; cat /dev/mem > m; echo b > /proc/sysrq-trigger\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_script_harms_nothing(folder: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    """Some take over 10 s: that is the CPU time of a process in the sandbox, and these use it up."""
    home = folder.parent
    (folder / "evil").write_text(f"#!/usr/bin/python3\nopen({str(folder / 'made')!r}, 'w')\n")
    script = HOSTILE[name].replace("{work}", str(folder)).replace("{home}", str(home))
    (folder / "start.sh").write_text(script + TRAIN)
    before = {path: (path.stat().st_mode, path.is_file() and path.read_bytes()) for path in home.rglob("*")}
    typed("start.sh")
    assert "start.sh: " in capfd.readouterr().err
    assert {path: (path.stat().st_mode, path.is_file() and path.read_bytes()) for path in home.rglob("*")} == before
    assert Path("/etc/passwd").stat().st_size > 0
    assert list((home.parent / "temporary").iterdir()) == []


def test_processes_are_limited_before_they_are_counted() -> None:
    """On a busy machine a fork bomb has thousands of them before anything else gets the CPU."""
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) < (6, 14):
        pytest.skip("needs Linux 6.14, whose PID namespaces have a limit of their own")
    most = Path("/proc/sys/kernel/pid_max")
    before = most.read_text()
    places = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    said = sandbox.run(
        ["bash", "-c", f"cat {most} >&2"], cwd="/tmp", environ=places, files={}, stubs=[], commands=[], facts={}
    )
    assert (said["stderr"], most.read_text()) == ("1000\n", before)


def test_a_script_reaches_no_network(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        port = server.getsockname()[1]
        reach = f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo reached >&3\ncurl http://127.0.0.1:{port}\n"
        (folder / "start.sh").write_text(reach + TRAIN)
        typed("start.sh")
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("data", [b"\x7fELF\x02\x01\0\0" * 100, b"echo 'no end\ntorchrun train.py\n", b"\0" * 10, b""])
def test_what_is_no_script_is_refused_before_it_is_run(folder: Path, data: bytes) -> None:
    (folder / "start.sh").write_bytes(b"touch made\n" + data if data.startswith(b"echo") else data)
    with pytest.raises(UsageError):
        typed("start.sh")
    assert not (folder / "made").exists()


def test_ranks_of_a_launcher_that_is_given_nonsense_are_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "start.sh").write_text("exit 3\n" + TRAIN)
    assert typed("start.sh") == 1
    said = capfd.readouterr().err
    assert "start.sh: not verified: the script ended before its training\n  DIFFERS: ranks: 0 -> 2\n" in said


def test_what_is_found_is_written_as_json(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = "/opt/env/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 train.py\n"
    (folder / "start.sh").write_text(f"export NNODES=1\nexport A=1\n{run}")
    assert typed("start.sh", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert "script: train.py" in found["job_files"].pop("job.yaml")
    assert found == {
        "verified": True,
        "job_files": {},
        "scripts": [
            {
                "file": "start.sh",
                "job_file": "job.yaml",
                "verified": True,
                "ranks": 2,
                "equal": [
                    "rank, local rank, world size and host",
                    "working directory",
                    "interpreter",
                    "program",
                    "environment (A)",
                ],
                "differences": [
                    {
                        "what": "address and port",
                        "script": "localhost:29500",
                        "job": "chosen when it starts",
                        "wanted": True,
                        "why": "127.0.0.1, a free port: all ranks are on this machine",
                    },
                    {
                        "what": "variable NNODES",
                        "script": "1",
                        "job": "nothing",
                        "wanted": True,
                        "why": "left out: NNODES=1: allranks sets what the ranks need of it",
                    },
                ],
                "cause": None,
            }
        ],
    }


def test_a_job_that_cannot_be_planned_is_an_error_in_json(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "start.sh").write_text(TRAIN)
    monkeypatch.setattr(write, "job_text", lambda *_: "scrip: train.py\n")
    assert typed("start.sh", "--json") == 1
    found = json.loads(capfd.readouterr().out)
    assert found["verified"] is False
    assert [sorted(each) for each in found["scripts"]] == [["error", "file", "job_file"]]


def test_json_is_of_what_verify_finds(folder: Path) -> None:
    (folder / "start.sh").write_text(TRAIN)
    with pytest.raises(UsageError, match="--json needs --verify"):
        convert.command.main(["start.sh", "--json"], standalone_mode=False)


def test_the_sandbox_plays_each_launcher_of_mpi() -> None:
    """It imports nothing of allranks, so that it has the names itself."""
    assert {name for name, part in COMMANDS.items() if part is mpirun} == MPI
